"""The roles that plugins play, as base classes: plain methods for what the core drives, hooks for what it asks.

A plugin is a class with a ``name``, an ``Options`` model, what it ``provides`` and ``requires``. The registry builds it
with its validated options; the core then calls ``start`` once, in the order executor, KV cache, scheduler, policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.core.protocols.attention import Attention
from engine.core.protocols.connector import Connector
from engine.core.protocols.executor import Executor
from engine.core.protocols.frontend import Frontend
from engine.core.protocols.grammar import CompiledGrammar, GrammarCompiler, Matcher
from engine.core.protocols.kvcache import KVCache, Match, Outlined, PrefixNode, Publication, PublishWhen
from engine.core.protocols.plugin import Context, Limits, ModelInfo, Plugin, PluginOptions, Policy
from engine.core.protocols.scheduler import Scheduler
from engine.core.protocols.tools import ToolParser, ToolStream

__all__ = [
    "Attention",
    "CompiledGrammar",
    "Connector",
    "Context",
    "Executor",
    "Frontend",
    "GROUPS",
    "GrammarCompiler",
    "KVCache",
    "Limits",
    "Match",
    "Matcher",
    "ModelInfo",
    "Outlined",
    "Plugin",
    "PluginOptions",
    "Policy",
    "PrefixNode",
    "Publication",
    "PublishWhen",
    "ROLES",
    "Scheduler",
    "ToolParser",
    "ToolStream",
]

ROLES: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "scheduler": Scheduler,
        "kvcache": KVCache,
        "attention": Attention,
        "connector": Connector,
        "executor": Executor,
        "grammar": GrammarCompiler,
        "frontend": Frontend,
        "policy": Policy,
        "tool_parser": ToolParser,
    }
)
"""Role name -> base class."""

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "scheduler": "engine.schedulers",
        "kvcache": "engine.kvcaches",
        "attention": "engine.attention",
        "connector": "engine.connectors",
        "executor": "engine.executors",
        "grammar": "engine.grammars",
        "frontend": "engine.frontends",
        "policy": "engine.policies",
        "tool_parser": "engine.tool_parsers",
    }
)
"""Role name -> entry-point group."""
