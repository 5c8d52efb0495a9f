"""Who waits for pages that a transfer holds back is not failed for it, whatever the scheduler."""

from __future__ import annotations

import textwrap
import time

import pytest

import engine.core
from engine.core import Connector, SamplingParams, Transfer, TransferEvent, hookimpl, hookspecs
from engine.testing import make_core


class Slow(Connector):
    """Takes its time, or for ever."""

    name = "slow"
    seconds = 0.05

    def __init__(self):
        super().__init__()
        self.until = {}

    @hookimpl
    def transfer_kv(self, transfers):
        self.until.update({wish.id: time.monotonic() + self.seconds for wish in transfers})
        ended = [name for name, until in self.until.items() if until < time.monotonic()]
        return [TransferEvent(name, "done") for name in ended if self.until.pop(name)]


def documented():
    """The scheduler of the documentation of the hook ``plan``."""
    names = {name: getattr(engine.core, name) for name in engine.core.__all__}
    exec(textwrap.dedent(hookspecs.plan.__doc__.split("Example::", 1)[1]), names)
    return names["Serial"]()


def held_back(scheduler, prompt, **more):
    """Three of eight pages are on their way elsewhere, and a request comes that needs all eight."""
    connector = Slow()
    core = make_core(scheduler=scheduler, connectors=[connector], num_pages=8, page_size=4, **more)
    gone = core.add([1] * 9, SamplingParams(max_tokens=5), request_id="gone")
    core.step()
    core.transfer(Transfer("t", "push", "gone", tuple(gone.pages[:3])))
    core.abort("gone")
    core.kv.reset()
    return core, connector, core.add([2] * prompt, SamplingParams(max_tokens=31 - prompt))


@pytest.mark.parametrize("prompt", [10, 30])
@pytest.mark.parametrize("scheduler", ["unified", "radix", "documented"])
def test_it_waits_until_the_transfer_has_ended(scheduler, prompt):
    core, _, request = held_back(documented() if scheduler == "documented" else scheduler, prompt)
    while core.has_work:
        core.step()
    assert request.finish == "length", request.detail


def test_it_does_not_wait_for_ever():
    now = [0.0]
    core, connector, request = held_back("unified", 30, clock=lambda: now[0])
    connector.until["t"] = connector.seconds = float("inf")
    for _ in range(20):
        core.step()
    assert not request.finished
    now[0] = 600.0
    for _ in range(5):
        core.step()
    assert request.finish == "error"
