"""What every connector must do: end every transfer, block nobody, answer for what it was asked."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any, ClassVar
from uuid import uuid4

from engine.core.loop import EngineCore
from engine.core.plan import Transfer
from engine.core.protocols import Plugin
from engine.core.request import SamplingParams
from engine.testing.executors import ShadowExecutor
from engine.testing.guard import Violation, audit_pages
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.workload import closing

PATIENCE = 20.0  # seconds


class ConnectorSuite(Suite):
    """Rules of a connector.

    Class attribute ``remembers``: of a connector that saves and loads, whether what it was given surely comes back.
    """

    remembers: ClassVar[bool] = True

    role = "connector"

    def core(self, connector: Plugin, **more: Any) -> EngineCore:
        """An engine whose KV memory tells whose content it holds."""
        return make_core(**{"connectors": [connector], "executor": ShadowExecutor(), **self.limits, **more})

    def try_once(self, plugin: Plugin) -> None:
        """One transfer, alone."""
        self._transfer(plugin, aborted=False)

    def test_every_transfer_ends(self) -> None:
        """Every transfer ends exactly once (done or failed), and its pages are free after that; also if the request
        that it was for is gone."""
        for aborted in (False, True):
            self._transfer(self.make(), aborted=aborted)

    def _transfer(self, connector: Plugin, *, aborted: bool) -> None:
        core = self.core(connector)
        with closing(core):
            request = core.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=8), request_id="moving", read_cache=False)
            core.step()
            for kind in ("push", "pull"):
                core.transfer(Transfer(f"{kind}-1", kind, "moving", tuple(request.pages)))
            if aborted:
                core.abort("moving")
            self._settle(core)

    def test_what_is_loaded_is_what_was_saved(self) -> None:
        """Of a connector that saves and loads: what one request computed comes back for another after the cache has
        lost it, and is what would have been computed. (``remembers = False``: it need not come back.)"""
        connector = self.make()
        if not (connector.loads and connector.saves):
            connector.close()
            return
        core = self.core(connector)
        with closing(core):
            said = []
            own, other = uuid4().hex, uuid4().hex  # what is kept on a disk may be there since an earlier run
            for salt in (own, own, other):
                request = core.add(list(range(40)), SamplingParams(max_tokens=8), salt=salt)
                self._settle(core)
                said.append(request.output)
                core.kv.reset()
            if said[0] != said[1]:
                raise Violation("a request says something else on content that was loaded")
            if self.remembers and not core.counters.loaded_tokens:
                raise Violation("nothing came back of what was saved")
            if request.cached_tokens:
                raise Violation("content came back for a request of another namespace")

    def test_nobody_reads_a_wrong_page(self) -> None:
        """Requests that share beginnings come, end and are aborted, in a pool that is too small for all: nobody ever
        reads KV that is not its own, and every page is free in the end."""
        for scheduler, kvcache, overlap in itertools.product(("unified", "radix"), ("paged", "radix"), (False, True)):
            draw = random.Random(self.seed)
            core = self.core(self.make(), scheduler=scheduler, kvcache=kvcache, overlap=overlap, num_pages=30)
            with closing(core):
                for _ in range(30):
                    tokens = [*range(draw.randrange(1, 30)), draw.randrange(90)]
                    core.add(tokens, SamplingParams(max_tokens=draw.randrange(1, 12)), salt=draw.choice(("", "s")))
                    for _ in range(draw.randrange(8)):
                        core.step()
                    if core.requests and draw.random() < 0.2:
                        core.abort(draw.choice(sorted(core.requests)))
                self._settle(core)

    def _settle(self, core: EngineCore) -> None:
        """Step until nothing is left to do."""
        until = time.monotonic() + PATIENCE
        while core.has_work and time.monotonic() < until:
            core.step()
            audit_pages(core)
        if core.has_work:
            raise Violation(f"a transfer is open after {PATIENCE:g} seconds")
        if core.counters.stray_events:
            raise Violation(f"{core.counters.stray_events} events name no open transfer")
        if core.pool.num_fenced:
            raise Violation(f"{core.pool.num_fenced} pages are fenced and no transfer is open")
        mismatch = core.executor.mismatch if isinstance(core.executor, ShadowExecutor) else None
        if mismatch is not None:
            raise Violation(mismatch)
        numbers = core.kv.numbers()
        if numbers.free + numbers.evictable != numbers.total:
            raise Violation(f"pages are lost: {numbers}")
