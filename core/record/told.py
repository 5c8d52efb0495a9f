"""What a core tells of itself while it works. Told to this, it goes nowhere: nothing is recorded."""

from __future__ import annotations

from collections.abc import Collection

from engine.core.plan import Outcome, Plan
from engine.core.request import Finish, Request


class Told:
    """Told by one core, on the engine's thread. A recorder is one that writes it down.

    Attributes:
        deciding: a step is being planned or committed: what happens follows from what was told. The core sets it.
    """

    deciding = False

    # ---- what the core is asked

    def added(self, request: Request, deadline: float | None, parked: Collection[str]) -> None:
        """A request was accepted."""

    def readied(self, request_id: str, what: str) -> None:
        """What a parked request waits for is there."""

    def aborted(self, request: Request, finish: Finish, detail: str | None) -> None:
        """A request is about to be ended from outside."""

    def displaced(self, request: Request) -> None:
        """A request was ended to make room for one that then had none after all."""

    def failing(self, plan: Plan) -> None:
        """The oldest step in flight has failed."""

    def renamed(self, fingerprint: str) -> None:
        """The model has other weights."""

    def flushed(self) -> None:
        """The prefix cache is about to forget everything."""

    def expired(self) -> None:
        """The prefix cache forgets what was for a time that is over."""

    def interrupted(self) -> None:
        """Something struck in the middle of a step: what follows does not follow from what was told."""

    def idled(self) -> None:
        """Nothing is left to plan."""

    # ---- what it decides and brings about

    def planned(self, plan: Plan, began: float) -> None:
        """A step was planned; it began then."""

    def committed(self, outcome: Outcome, began: float) -> None:
        """A step was committed; that began then."""

    def ended(self, request: Request) -> None:
        """A request has ended and lets go of what it holds."""
