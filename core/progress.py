"""No silent hang: steps that move nothing although there is work are counted, and after a few one request ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.exchange import PATIENCE
from engine.core.plan import Outcome, Why
from engine.core.request import State

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

BEFORE_OVERRIDE = 1
BEFORE_FAILING = 2  # after the override


class Progress:
    """Watches a core's commits."""

    def __init__(self) -> None:
        self._idle = 0
        self._held_since: float | None = None

    @property
    def override(self) -> bool:
        """Whether the next step overrides objections, since nothing has moved with them."""
        return self._idle > BEFORE_OVERRIDE

    def committed(self, core: EngineCore, outcome: Outcome) -> None:
        """Count a plan that came to nothing; after a few, end one request with a diagnosis. Mutates."""
        requests, dropped = outcome.plan.requests, outcome.dropped
        moved = len(dropped) < len(requests) or any(requests[row].finished for row in dropped)
        if moved or not (core.running or len(core.waiting)):
            self._idle, self._held_since = 0, None
            return
        self._idle += 1
        if self._idle <= BEFORE_OVERRIDE + BEFORE_FAILING or self._held_back(core):
            return
        stuck = core.running[-1] if core.running else core.waiting.head()
        assert stuck is not None
        if stuck.state is State.RUNNING:
            cause = "it runs, but was granted nothing that came to a result"
        else:
            why, words = core.why(stuck.id) or (Why.NOT_ASKED, "")
            cause = f"nothing runs, and still it waits: {why} {words}".rstrip()
        core.fail(stuck, f"scheduler {core.scheduler.name!r} made no progress for {self._idle} steps; {cause}")
        self._idle = 0

    def _held_back(self, core: EngineCore) -> bool:
        """Whether transfers hold pages that their owners gave up: they come back, unless a connector never answers."""
        if not (core.exchange and core.pool.num_fenced):
            return False
        now = core.roster.now()
        if self._held_since is None:
            self._held_since = now
        return now - self._held_since < PATIENCE
