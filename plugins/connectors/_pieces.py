"""Arithmetic on pieces of memory that all transports need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.plugins.connectors._transport import Words


def spans(memory: Sequence[NDArray[np.uint8]]) -> list[tuple[int, int]]:
    """(address, bytes) of contiguous arrays, in order of address; neighbours are one span. Does not mutate.

    Libraries keep a handle a span, and a card names each of them. Raises ``ValueError`` where an array has holes.
    """
    found: list[tuple[int, int]] = []
    for array in sorted((one for one in memory if one.nbytes), key=lambda one: one.ctypes.data):
        if not array.flags.c_contiguous:
            raise ValueError("memory that moves must be contiguous")
        start = array.ctypes.data
        if found and start <= sum(found[-1]):
            first, length = found[-1]
            found[-1] = first, max(length, start + array.nbytes - first)
        else:
            found.append((start, array.nbytes))
    return found


def within(places: Words, lengths: Words, held: Sequence[tuple[int, int]]) -> bool:
    """Whether every piece lies in one of the spans, which are in order and do not touch. Does not mutate."""
    if not len(places):
        return True
    if not held:
        return False
    starts = np.array([start for start, _ in held], np.uint64)
    ends = np.array([start + length for start, length in held], np.uint64)
    at = np.searchsorted(starts, places, side="right")
    if not at.all():
        return False
    room = ends[at - 1]
    return bool(((places <= room) & (lengths <= room - np.minimum(places, room))).all())
