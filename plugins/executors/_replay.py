"""Work that is told to a device once and done again and again: CUDA graphs; and, elsewhere, the same work called again.

A decode step of a small model is some hundred kernels of a few µs each: telling a GPU of them one by one takes longer
than computing them. A graph is told as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Run = Callable[[], Tensors]


class Capture(Protocol):
    """Makes work replayable. The work reads and writes memory whose place does not change; it copies nothing from the
    host and waits for nothing."""

    def __call__(self, prepare: Callable[[], None], work: Run) -> Run:
        """``prepare``, then ``work`` once or more. Returns what does it again.

        What the returned function returns are the same tensors every time: each call writes over what the last one
        left, and over what the functions made by this capture before it left.
        """


class EagerCapture:
    """Calls the work again. For tests of all that is around a graph, where there is no device that has them."""

    def __call__(self, prepare: Callable[[], None], work: Run) -> Run:
        """As ``Capture`` says; the results are copied to where the first ones were."""
        prepare()
        kept = tuple(tensor.clone() for tensor in work())

        def replay() -> Tensors:
            for place, tensor in zip(kept, work(), strict=True):
                place.copy_(tensor)
            return kept

        return replay


class CudaCapture:
    """Captures CUDA graphs, on a stream of its own; all of them share one pool of memory.

    That is right as long as nobody looks at the results of one graph after another was replayed. Capturing looks at
    this thread alone: other threads may go on using the device, as long as they do not capture too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, prepare: Callable[[], None], work: Run) -> Run:
        """As ``Capture`` says. Run once before it is captured: kernels are compiled and libraries make their plans."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            prepare()
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            results = work()
        before.wait_stream(self._stream)

        def replay() -> Tensors:
            graph.replay()
            return results

        return replay
