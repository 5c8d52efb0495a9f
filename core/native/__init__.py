"""Kernels for the CPU, in C++, compiled on first use: matrix products, paged attention, what lies between them.

Plain addresses and numbers in, nothing of torch: executors and attention backends bring their own tensors. Every row is
computed alike, bit for bit, whatever else is in the batch, and whatever the number of threads.
"""

from engine.core.native.build import NoKernels, built, cache_folder, find_compiler, instruction_set
from engine.core.native.kernels import (
    Kernels,
    LayerSpec,
    LayersSpec,
    LinearSpec,
    PagedBatch,
    PagedShape,
    Rooms,
    kernels,
    why_not,
)

__all__ = [
    "Kernels", "LayerSpec", "LayersSpec", "LinearSpec", "NoKernels", "PagedBatch", "PagedShape", "Rooms", "built",
    "cache_folder", "find_compiler", "instruction_set", "kernels", "why_not",
]  # fmt: skip
