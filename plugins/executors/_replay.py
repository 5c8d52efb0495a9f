"""Work that is told to a device once and done again and again: CUDA graphs; and, elsewhere, the same work called again.

A decode step of a small model is some hundred kernels of a few µs each: telling a GPU of them one by one takes longer
than computing them. A graph is told as one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = tuple[Tensor, ...]
Run = Callable[[], Tensors]


WAITS = frozenset(
    {
        "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
        "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount",
    }
)  # fmt: skip
MASKS = (torch.bool, torch.uint8)


class Waits(Exception):
    """The work cannot be captured: the host waits for the device in it, or copies to it. The message says where."""


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Inside, what would be an error in a capture raises ``Waits``, on any device.

    A failed capture may leave the device's context in an unknown state; this leaves nothing.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name in WAITS or (name in ("_to_copy", "to", "copy_") and _crosses(args, kwargs)):
            raise Waits(f"it waits for the device, or copies to it, in {func}")
        if name in ("index", "index_put_", "index_put") and any(
            isinstance(one, Tensor) and one.dtype in MASKS for one in args[1]
        ):
            raise Waits(f"it counts a mask on the device, in {func}")
        return func(*args, **kwargs)


def _crosses(args: Any, kwargs: Any) -> bool:
    """Whether a copy goes from one device to another."""
    devices = {one.device for one in args if isinstance(one, Tensor)}
    wanted = kwargs.get("device") or next((one for one in args if isinstance(one, torch.device)), None)
    if wanted is None or len(devices) > 1:
        return len(devices) > 1
    wanted = torch.device(wanted)
    return not any(wanted in (device, torch.device(device.type)) for device in devices)


class Capture(Protocol):
    """Makes work replayable. The work reads and writes memory whose place does not change; it copies nothing from the
    host and waits for nothing."""

    def __call__(self, prepare: Callable[[], None], work: Run) -> Run:
        """``prepare``, then ``work`` once or more. Returns what does it again.

        What the returned function returns are the same tensors every time: each call writes over what the last one
        left, and over what other functions of this capture left. The work with the largest results comes first.

        Raises:
            Waits: the work is not of that kind.
        """


class EagerCapture:
    """Calls the work again. For tests of all that is around a graph, where there is no device that has them.

    Results of all its functions lie in one place, so that whoever looks at some that are over reads others' numbers.

    Args:
        strict: refuse work that a device could not capture. The compiled kernels of the CPU are such.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._pool: Tensors = ()

    def __call__(self, prepare: Callable[[], None], work: Run) -> Run:
        """As ``Capture`` says; the results are copied to where the first ones were."""
        prepare()
        with Watch() if self._strict else nullcontext():
            made = work()
        self._pool = self._pool or tuple(tensor.clone() for tensor in made)
        kept = tuple(
            place.view(-1)[: tensor.numel()].view(tensor.shape) for place, tensor in zip(self._pool, made, strict=True)
        )

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
            with Watch():
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
