"""No silent hang: steps that move nothing although there is work are counted, and after a few one request ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.plan import Outcome, Why
from engine.core.request import State

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

BEFORE_OVERRIDE = 1
BEFORE_FAILING = 2  # after the override
FENCED = 60.0  # seconds that pages of open transfers are waited for while nothing moves


class Progress:
    """Watches a core's commits."""

    def __init__(self) -> None:
        self._idle = 0
        self._since: float | None = None  # nothing moves, and transfers hold pages back

    @property
    def override(self) -> bool:
        """Whether the next step overrides objections, since nothing has moved with them."""
        return self._idle > BEFORE_OVERRIDE

    def committed(self, core: EngineCore, outcome: Outcome) -> None:
        """Count a plan that came to nothing; after a few, end one request with a diagnosis. Mutates."""
        requests, dropped = outcome.plan.requests, outcome.dropped
        moved = len(dropped) < len(requests) or any(requests[row].finished for row in dropped)
        if moved or not (core.running or len(core.waiting)):
            self._idle, self._since = 0, None
            return
        fenced, now = core.pool.num_fenced, core.roster.now()
        if fenced:  # they come back when their transfers end
            self._since = now if self._since is None else self._since
            if now - self._since < FENCED:
                return
        self._idle += 1
        if self._idle <= BEFORE_OVERRIDE + BEFORE_FAILING:
            return
        stuck = core.running[-1] if core.running else core.waiting.head()
        assert stuck is not None
        if stuck.state is State.RUNNING:
            cause = "it runs, but was granted nothing that came to a result"
        else:
            why, words = core.why(stuck.id) or (Why.NOT_ASKED, "")
            cause = f"nothing runs, and still it waits: {why} {words}".rstrip()
        if fenced:
            cause += f"; {fenced} pages are held back by transfers that have not ended in {FENCED:g} seconds"
        core.fail(stuck, f"scheduler {core.scheduler.name!r} made no progress for {self._idle} steps; {cause}")
        self._idle = 0
