"""A stand-in for CUDA graphs: what runs in one runs again on the same memory, whatever Python knows by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Capture(TorchFunctionMode):
    """A CUDA graph without CUDA: what runs inside is kept, and ``replay`` runs it again on the same memory."""

    now: Capture | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.empty and isinstance(result, Tensor):
            self.launches.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Every launch once more: results go where they went."""
        for func, args, kwargs, result in self.launches:
            again = func(*args, **kwargs)
            if again.data_ptr() != result.data_ptr():
                result.copy_(again)


@contextmanager
def capturing() -> Iterator[Capture]:
    """What runs inside is captured; nothing may be planned there."""
    with Capture() as capture:
        Capture.now = capture
        try:
            yield capture
        finally:
            Capture.now = None


def launched(kernel: Callable[..., Any], query: Tensor, cache: Any, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run a kernel; one launch of the graph that is captured, whatever happens inside."""
    capture, Capture.now = Capture.now, None
    try:
        with torch._C.DisableTorchFunction():
            result: tuple[Tensor, Tensor] = kernel(query, cache, out)
            if capture is not None:
                capture.launches.append((lambda: kernel(query, cache, result[0])[0], (), {}, result[0]))
    finally:
        Capture.now = capture
    return result


def not_captured() -> None:
    if Capture.now is not None:
        raise RuntimeError("plan() copies from the host: it cannot be captured")
