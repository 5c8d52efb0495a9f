"""The pages of a pool as a map of bounded size, walked in slices so that no look takes long."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

CELLS = 1024
VISITS = 16384  # pages that one look may visit: about a millisecond
STATES = ("free", "cached", "prefill", "decode", "shared")


class PageMap:
    """How many pages of each stretch are in which state.

    ``free`` (or about to be: a transfer still touches it); ``cached``: it has content that nobody uses now;
    ``prefill`` and ``decode``: one request uses it, in that phase; ``shared``: several do. A pool of more pages than
    one look may visit is walked over several looks, while the engine goes on: then the map is that old, and its
    stretches are not all of one moment.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._walk = self._walked()
        self._whole: dict[str, Any] | None = None
        self._visits = 0

    def look(self) -> dict[str, Any] | None:
        """Walk on. The newest whole map, ``None`` where there is none yet: ``pages`` a cell, ``cells`` by state, and
        when its walk began and ended. Mutates."""
        self._visits = VISITS
        self._whole = next(self._walk) or self._whole
        return self._whole

    def _walked(self) -> Generator[dict[str, Any] | None, None, None]:
        """Maps, one after the other; ``None`` between two slices."""
        core = self._core
        total = core.pool.num_pages
        each = -(-total // CELLS)
        while True:
            began = core.now()
            users, phase = np.zeros(total, np.uint16), np.zeros(total, np.uint8)
            for request in list(core.running):
                table = request.pages
                decodes = request.computed >= request.prefill_target
                for first in range(0, len(table), VISITS):
                    part = np.array(table[first : first + VISITS], np.intp)
                    users[part] += 1
                    phase[part] |= 2 if decodes else 1
                    if self._spent(len(part)):
                        yield None
            held = np.zeros(total, bool)
            for first in range(0, total, VISITS):
                stretch = range(first, min(total, first + VISITS))
                held[core.pool.held_of(stretch)] = True
                if self._spent(len(stretch)) and stretch.stop < total:
                    yield None
            yield {"pages": each, "total": total, "began": began, "ended": core.now(),
                   "cells": _counts(users, phase, held, each)}  # fmt: skip

    def _spent(self, visits: int) -> bool:
        self._visits -= visits
        return self._visits <= 0


def _counts(users: Any, phase: Any, held: Any, each: int) -> list[list[int]]:
    """By state, how many pages of each cell are in it."""
    one = users == 1
    found = (~held, held & (users == 0), held & one & (phase == 1), held & one & (phase == 2), held & (users > 1))
    starts = np.arange(0, len(held), each)
    return [np.add.reduceat(state, starts, dtype=np.int64).tolist() for state in found]
