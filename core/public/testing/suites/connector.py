"""What every connector must do: end every transfer, block nobody, answer for what it was asked."""

from __future__ import annotations

from engine.core.plan import Transfer
from engine.core.protocols import Plugin
from engine.core.request import SamplingParams
from engine.testing.guard import Violation, audit_pages
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.workload import closing

PATIENCE = 1000


class ConnectorSuite(Suite):
    """Rules of a connector."""

    role = "connector"

    def try_once(self, plugin: Plugin) -> None:
        """One transfer, alone."""
        self._transfer(plugin, aborted=False)

    def test_every_transfer_ends(self) -> None:
        """Every transfer ends exactly once (done or failed), and its pages are free after that; also if the request
        that it was for is gone."""
        for aborted in (False, True):
            self._transfer(self.make(), aborted=aborted)

    def _transfer(self, connector: Plugin, *, aborted: bool) -> None:
        core = make_core(**{"connectors": [connector], **self.limits})
        with closing(core):
            request = core.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=8), request_id="moving")
            core.step()
            for kind in ("push", "pull"):
                core.transfer(Transfer(f"{kind}-1", kind, "moving", tuple(request.pages)))
            if aborted:
                core.abort("moving")
            for _ in range(PATIENCE):
                if not core.has_work:
                    break
                core.step()
                audit_pages(core)
            if core.has_work:
                raise Violation(f"a transfer is open after {PATIENCE} calls")
            if core.counters.stray_events:
                raise Violation(f"{core.counters.stray_events} events name no open transfer")
            if core.pool.num_fenced:
                raise Violation(f"{core.pool.num_fenced} pages are fenced and no transfer is open")
