"""Small numbers on their way to a device: ids, positions, page tables. The host never waits for the device.

A copy out of ordinary memory makes the host wait until the device has come to it, which is after the step in flight. A
copy out of pinned memory does not, but then the memory must stay as it is until it was read: so buffers are used in
turn, each again only when a fence behind its copies was passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plugins.executors._device import Fence

LINE = 64  # bytes; what is copied begins at multiples of it
FIRST = 1 << 16  # bytes of a buffer at first
NUMBERS: dict[torch.dtype, Any] = {
    torch.long: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bool: np.bool_,
}


class Staging:
    """Takes numbers to the device, step by step: ``with staging.step(): … staging.put(…) …``.

    Args:
        depth: buffers used in turn. Two steps may be in flight, so with three the host finds a free one.
    """

    def __init__(self, device: torch.device, depth: int = 3) -> None:
        self.device = device
        self._buffers = [_Buffer(device) for _ in range(depth)]
        self._turn = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, ``put`` may be called. Waits only where a buffer's last copies are not over. Mutates."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.reset()
        try:
            yield
        finally:
            buffer.fence.mark()

    def put(self, values: Any, dtype: torch.dtype, into: Tensor | None = None) -> Tensor:
        """Numbers as a tensor on the device: a new one, of the shape of ``values``; or ``into``, which is filled.

        Args:
            values: numbers, a sequence of them, a numpy array.
            into: a contiguous tensor of as many numbers. Mutated.
        """
        array: NDArray[Any] = np.asarray(values, NUMBERS[dtype])
        host = self._buffers[self._turn].take(array.size * array.itemsize).view(dtype)
        host.numpy()[:] = array.reshape(-1)
        if into is None:
            into = torch.empty(array.shape, dtype=dtype, device=self.device)
        into.view(-1).copy_(host, non_blocking=True)
        return into


class _Buffer:
    """Pinned memory of one step (on the CPU: memory), which grows where a step needs more."""

    def __init__(self, device: torch.device) -> None:
        self.fence = Fence(device)
        self._pinned = device.type == "cuda"
        self._chunks = [self._new(FIRST)]
        self._used = 0

    def reset(self) -> None:
        """Begin anew, once all that was copied has been read. Mutates."""
        self.fence.wait()
        self._chunks = self._chunks[-1:]
        self._used = 0

    def take(self, size: int) -> Tensor:
        """So many bytes. Mutates."""
        if self._used + size > self._chunks[-1].numel():
            self._chunks.append(self._new(max(size, 2 * self._chunks[-1].numel())))  # the others are being read
            self._used = 0
        first = self._used
        self._used += -(-size // LINE) * LINE
        return self._chunks[-1][first : first + size]

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
