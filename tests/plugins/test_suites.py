"""The built-in plugins pass the suites that third parties subclass."""

from __future__ import annotations

from engine.core import Connector, TransferEvent, hookimpl
from engine.testing import (
    ConnectorSuite,
    DoNothing,
    ExecutorSuite,
    KVCacheSuite,
    PolicySuite,
    SchedulerSuite,
)


class TestUnified(SchedulerSuite):
    plugin = "unified"
    draft_options = {"num_spec_tokens": 3}


class TestUnifiedByPriority(SchedulerSuite):
    plugin = "vllm"
    options = {"policy": "priority", "long_prefill_token_threshold": 7, "watermark": 0.05}
    draft_options = {"num_spec_tokens": 2}
    seed = 1

    @classmethod
    def situations(cls):
        return super().situations()[1::4]


class TestRadix(SchedulerSuite):
    plugin = "radix"
    options = {"schedule_conservativeness": 0.1}


class TestPaged(KVCacheSuite):
    plugin = "paged"


class TestPagedWithoutCaching(KVCacheSuite):
    plugin = "paged"
    options = {"enable_prefix_caching": False}
    page_sizes = (4,)

    @classmethod
    def situations(cls):
        return super().situations()[::4]


class TestRadixCache(KVCacheSuite):
    plugin = "radix"


class TestDoNothing(PolicySuite):
    plugin = DoNothing


class TestSim(ExecutorSuite):
    plugin = "sim"


class Courier(Connector):
    """Carries everything by the next call."""

    name = "courier"

    def __init__(self, options=None):
        super().__init__(options)
        self.carried = []

    @hookimpl
    def transfer_kv(self, transfers):
        done, self.carried = self.carried, [TransferEvent(wish.id, "done") for wish in transfers]
        return done


class TestCourier(ConnectorSuite):
    plugin = Courier
