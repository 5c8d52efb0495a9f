"""An order once answered stands for a few steps while nobody joins or leaves: a blocked queue is not sorted anew."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.request import Request

PATIENCE = 8  # steps after which an unchanged queue is looked at again


class Standing:
    """Remembers the last answer of an ``order`` hook."""

    def __init__(self) -> None:
        self._answer: Sequence[Request] = ()
        self._asked = 0

    def holds(self, waiting: Sequence[Request]) -> bool:
        """True where the queue is what was answered last, and not for too many steps. Mutates."""
        self._asked += 1
        return self._asked < PATIENCE and len(waiting) == len(self._answer) and waiting == self._answer

    def keep(self, answer: Sequence[Request]) -> Sequence[Request]:
        """Remember a new answer, and return it. Mutates."""
        self._answer, self._asked = tuple(answer), 0
        return self._answer
