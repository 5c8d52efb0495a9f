"""The way of index numbers to the device: one copy for many arrays, from memory that the device reads by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.plugins.attention._rows import Ints

GRAIN = 32  # numbers; arrays begin at multiples of it, so that the kernels may count on their place
TURNS = 4  # copies that may be on their way


def packed(arrays: Sequence[Ints]) -> tuple[Ints, list[slice]]:
    """Arrays ``[numbers]`` one after the other, and where each is."""
    ends, at = [], 0
    for array in arrays:
        ends.append(slice(at, at + len(array)))
        at += -(-len(array) // GRAIN) * GRAIN
    together = np.zeros(at, np.int32)
    for array, end in zip(arrays, ends, strict=True):
        together[end] = array
    return together, ends


class Staging:
    """Sends arrays in the order of the current stream, without waiting for the device unless it is ``TURNS`` behind."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._hosts: list[Tensor] = [torch.empty(0, dtype=torch.int32) for _ in range(TURNS)]
        self._done: list[Any] = [None] * TURNS

    def send(self, numbers: Ints, into: Tensor | None = None) -> Tensor:
        """A tensor on the device with these numbers; or ``into``, whose first numbers they become."""
        if self._device.type == "cpu":
            made = torch.from_numpy(numbers)
            if into is None:
                return made
            into[: len(numbers)].copy_(made)
            return into
        target = torch.empty(len(numbers), dtype=torch.int32, device=self._device) if into is None else into
        host = self._host(len(numbers))
        host.copy_(torch.from_numpy(numbers))
        target[: len(numbers)].copy_(host, non_blocking=True)
        self._done[self._turn].record()
        return target

    def _host(self, length: int) -> Tensor:
        """Pinned memory whose last copy has arrived."""
        self._turn = (self._turn + 1) % TURNS
        if self._done[self._turn] is None:
            self._done[self._turn] = torch.cuda.Event()
        else:
            self._done[self._turn].synchronize()
        if len(self._hosts[self._turn]) < length:
            self._hosts[self._turn] = torch.empty(max(1024, 2 * length), dtype=torch.int32, pin_memory=True)
        return self._hosts[self._turn][:length]
