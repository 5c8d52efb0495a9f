"""Conformance suites, one a role: what a plugin of that role must do, as tests to subclass."""

from __future__ import annotations

from engine.testing.suites.attention import AttentionSuite
from engine.testing.suites.base import Law, Suite
from engine.testing.suites.connector import ConnectorSuite
from engine.testing.suites.executor import ExecutorSuite
from engine.testing.suites.frontend import FrontendSuite
from engine.testing.suites.grammar import GrammarSuite
from engine.testing.suites.kvcache import KVCacheSuite
from engine.testing.suites.policy import PolicySuite
from engine.testing.suites.scheduler import SchedulerSuite
from engine.testing.suites.tool_parser import ToolParserSuite

SUITES: dict[str, type[Suite]] = {
    suite.role: suite
    for suite in (
        SchedulerSuite,
        KVCacheSuite,
        PolicySuite,
        ExecutorSuite,
        ConnectorSuite,
        AttentionSuite,
        FrontendSuite,
        GrammarSuite,
        ToolParserSuite,
    )
}
"""Role -> its suite."""

__all__ = [
    "SUITES",
    "AttentionSuite",
    "ConnectorSuite",
    "ExecutorSuite",
    "FrontendSuite",
    "GrammarSuite",
    "KVCacheSuite",
    "Law",
    "PolicySuite",
    "SchedulerSuite",
    "Suite",
    "ToolParserSuite",
]
