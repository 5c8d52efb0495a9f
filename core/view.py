"""What policies see of a step: everything to read, nothing to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.plan import KVNumbers
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.step import Step


class StepView:
    """What policies see of a step: everything to read, nothing to write."""

    __slots__ = ("_step",)

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def index(self) -> int:
        """Number of the step."""
        return self._step.index

    @property
    def budget(self) -> int:
        """Tokens that may still be granted."""
        return self._step.budget

    @property
    def override(self) -> bool:
        """True when objections are ignored, since nothing else could happen."""
        return self._step.override

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold pages, in order of admission."""
        return tuple(self._step.running)

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return self._step.waiting

    @property
    def slots(self) -> int:
        """How many more requests may start."""
        return self._step.slots

    @property
    def kv(self) -> KVNumbers:
        """Page counts at this moment."""
        return self._step.kv

    @property
    def tokens_planned(self) -> int:
        """Tokens granted so far."""
        return self._step.tokens_planned

    def granted(self, request: Request) -> int:
        """Tokens that the request was granted in this step."""
        return self._step.granted(request)

    def cached(self, request: Request) -> int:
        """Length of the request's cached prefix in tokens, looked up once a step."""
        return self._step.cached(request)
