"""Kit for plugin authors: drive an engine core by hand, with a model whose every token you choose.

Example::

    from engine.testing import ScriptedModel, make_core

    core = make_core(scheduler="radix", kvcache="paged", executor=ScriptedModel({"a": [7, 8]}), num_pages=8)
    core.add([1, 2, 3], SamplingParams(max_tokens=2), request_id="a")
    while core.has_work:
        core.step()
        core.check()
"""

from __future__ import annotations

from engine.testing.clients import Answer, FrontendClient, OpenAIClient, Refused
from engine.testing.doubles import DoNothing, FaultyCache, FaultyConnector
from engine.testing.executors import KVMismatch, ScriptedExecutor, ScriptedModel, ShadowExecutor, Witness
from engine.testing.guard import Violation
from engine.testing.harness import Harness
from engine.testing.making import make_core
from engine.testing.suites import (
    SUITES,
    AttentionSuite,
    ConnectorSuite,
    ExecutorSuite,
    FrontendSuite,
    GrammarSuite,
    KVCacheSuite,
    PolicySuite,
    SchedulerSuite,
    Suite,
    ToolParserSuite,
)
from engine.testing.workload import Situation, Workload

__all__ = [
    "SUITES",
    "Answer",
    "AttentionSuite",
    "ConnectorSuite",
    "DoNothing",
    "ExecutorSuite",
    "FaultyCache",
    "FaultyConnector",
    "FrontendClient",
    "FrontendSuite",
    "GrammarSuite",
    "Harness",
    "KVCacheSuite",
    "KVMismatch",
    "OpenAIClient",
    "PolicySuite",
    "Refused",
    "SchedulerSuite",
    "ScriptedExecutor",
    "ScriptedModel",
    "ShadowExecutor",
    "Situation",
    "Suite",
    "ToolParserSuite",
    "Violation",
    "Witness",
    "Workload",
    "make_core",
]
