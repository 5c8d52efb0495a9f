"""KV memory of all layers, one tensor after the other in memory that other processes of the host can map."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.memory import SharedMemory
from engine.plugins.executors._memfd import shared_file

GRAIN = 4096  # bytes; tensors begin at multiples of it, after one of them that holds the file's mark


def zeros(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], SharedMemory | None]:
    """Zeroed tensors one after the other, and where they lie for others; ordinary memory where there is no memfd, and
    a device's own where they are to lie on one.

    As with ordinary memory, a page of the system's is taken as it is written to. It stays mapped as long as a tensor,
    or an array over one, is alive.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    made = shared_file(GRAIN + sum(map(_whole, sizes))) if device.type == "cpu" and all(sizes) else None
    if made is None:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes], None
    shared, memory = made
    tensors, at = [], GRAIN
    for shape, size in zip(shapes, sizes, strict=True):
        tensors.append(torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=at).view(shape))
        at += _whole(size)
    return tensors, shared


def _whole(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
