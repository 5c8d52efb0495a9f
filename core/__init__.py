"""The core of Sixhooks: hook specs, types, plugin registry, configuration, step loop, invariants.

Everything that a plugin needs is imported from here.
"""

from engine.core.assemble import assemble
from engine.core.batch import AttentionLayer, Batch
from engine.core.cache_events import CacheBatch, CacheEvent, CacheLog, CacheSnapshot, TooOld
from engine.core.cache_index import CacheIndex
from engine.core.cache_watch import CacheWatcher
from engine.core.config import EngineConfig, Selection, load_config
from engine.core.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    ExecutionError,
    InvalidRequest,
    InvariantViolation,
    ModelError,
    OutOfPages,
    PluginDeprecationWarning,
    PluginError,
    QueueFull,
)
from engine.core.grammar import Grammar, GrammarError, Vocabulary
from engine.core.hookspecs import hookimpl
from engine.core.loop import EngineCore
from engine.core.plan import (
    Candidate,
    Delta,
    EvictionPool,
    KVNumbers,
    Outcome,
    Plan,
    Reject,
    Room,
    Transfer,
    TransferEvent,
    Wait,
    Why,
)
from engine.core.pooling import POOLING, Pooling
from engine.core.protocols import (
    Attention,
    CompiledGrammar,
    Connector,
    Context,
    Executor,
    Frontend,
    GrammarCompiler,
    KVCache,
    Limits,
    Match,
    Matcher,
    ModelInfo,
    Outlined,
    Plugin,
    PluginOptions,
    Policy,
    Publication,
    Scheduler,
    ToolParser,
)
from engine.core.request import Finish, Request, State
from engine.core.sampling import SAMPLING, SamplingParams, TokenLogprobs
from engine.core.step import Step
from engine.core.tools import CallPiece, Heard, Tool, ToolCall
from engine.core.version import API_VERSION
from engine.core.view import StepView

__all__ = [
    "API_VERSION",
    "POOLING",
    "SAMPLING",
    "Attention",
    "AttentionLayer",
    "Batch",
    "CacheBatch",
    "CacheEvent",
    "CacheIndex",
    "CacheLog",
    "CacheSnapshot",
    "CacheWatcher",
    "CallPiece",
    "Candidate",
    "CompiledGrammar",
    "ConfigError",
    "Connector",
    "Context",
    "Delta",
    "EngineConfig",
    "EngineCore",
    "EngineDead",
    "EngineError",
    "EvictionPool",
    "ExecutionError",
    "Executor",
    "Finish",
    "Frontend",
    "Grammar",
    "GrammarCompiler",
    "GrammarError",
    "Heard",
    "InvalidRequest",
    "InvariantViolation",
    "KVCache",
    "KVNumbers",
    "Limits",
    "Match",
    "Matcher",
    "ModelError",
    "ModelInfo",
    "OutOfPages",
    "Outcome",
    "Outlined",
    "Plan",
    "Plugin",
    "PluginDeprecationWarning",
    "PluginError",
    "PluginOptions",
    "Policy",
    "Pooling",
    "Publication",
    "QueueFull",
    "Reject",
    "Request",
    "Room",
    "SamplingParams",
    "Scheduler",
    "Selection",
    "State",
    "Step",
    "StepView",
    "TokenLogprobs",
    "TooOld",
    "Tool",
    "ToolCall",
    "ToolParser",
    "Vocabulary",
    "Transfer",
    "TransferEvent",
    "Wait",
    "Why",
    "assemble",
    "hookimpl",
    "load_config",
]
