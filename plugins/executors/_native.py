"""Linear layers computed by the compiled kernels, with weights in float32, bfloat16 or int8.

A weight is turned into float32 in the registers, wherever it is stored as less: products and sums are float32's. At one
row a step is bound by reading the weights, so half the bytes are nearly half the time.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor, nn

from engine.core.native import Kernels, LinearSpec
from engine.core.native.kernels import Format
from engine.plugins.executors._packed import Packed, pack_linears
from engine.plugins.executors._sampling import Argmax

LINE = 64  # bytes of a cache line
HUGE = 2 << 20  # bytes of a huge page


class Arena:
    """Memory for weights, in huge pages where the system has them. It is taken up as it is first written.

    Args:
        size: bytes, at least.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size + HUGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = -self._bytes.data_ptr() % HUGE

    def take(self, size: int) -> Tensor:
        """So many bytes, at the beginning of a cache line. Mutates."""
        first = self._used
        self._used += -(-size // LINE) * LINE
        return self._bytes[first : first + size]


class NativeLinear(Packed):
    """A linear layer in the kernels' panels.

    Attributes:
        spec: where its numbers lie, for the kernels. They stay there when they are replaced.
    """

    def __init__(self, linear: nn.Linear, kernels: Kernels, format: Format, arena: Arena) -> None:
        columns = padded(kernels, linear.out_features)
        super().__init__(linear)
        self._kernels = kernels
        self._weight = arena.take(columns * linear.in_features * format.item_bytes)
        self._scale = torch.zeros(columns)
        self._lanes = torch.zeros(columns)
        self.spec = LinearSpec(
            weight=self._weight.data_ptr(),
            scale=self._scale.data_ptr(),
            bias=None if linear.bias is None else self._lanes.data_ptr(),
            n=linear.out_features,
            k=linear.in_features,
            format=int(format),
        )
        if linear.bias is not None:
            self.set_bias(linear.bias.detach())
        self.pack(linear.weight.detach())

    def set_bias(self, bias: Tensor) -> None:
        """Replace the bias. Mutates."""
        self._bias = self._lanes[: self.out_features]
        self._bias.copy_(bias)

    def pack(self, weight: Tensor) -> None:
        """Replace the weight, ``[out_features, in_features]``. Mutates."""
        weight = weight.float().contiguous()
        self._kernels.pack(weight.data_ptr(), ctypes.byref(self.spec))

    def plain(self) -> Tensor:
        """The weight that is computed with: in float32 what was packed, else what became of it."""
        weight = torch.empty(self.out_features, self.in_features)
        self._kernels.unpack(ctypes.byref(self.spec), weight.data_ptr())
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., in_features]`` to a new ``[..., out_features]``."""
        rows = x.reshape(-1, self.in_features).contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features)
        count = rows.shape[0]
        self._kernels.linear(
            *(ctypes.byref(self.spec), rows.data_ptr(), self.in_features, count, y.data_ptr(), torch.get_num_threads())
        )
        return y


def argmax_of(kernels: Kernels) -> Argmax:
    """What finds the likeliest token of each row of logits ``[rows, vocab]``, as ``_sampling.argmax`` does."""

    def argmax(logits: Tensor) -> Tensor:
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.long)
        kernels.largest(logits.data_ptr(), rows, width, tokens.data_ptr(), torch.get_num_threads())
        return tokens

    return argmax


def padded(kernels: Kernels, columns: int) -> int:
    """Columns of whole panels."""
    return -(-columns // kernels.lanes) * kernels.lanes


def pack_native(module: nn.Module, kernels: Kernels, format: Format) -> int:
    """Replace every plain ``nn.Linear`` below ``module``. Mutates it; returns how many were replaced."""
    linears = (child for child in module.modules() if type(child) is nn.Linear)
    places = (padded(kernels, child.out_features) * child.in_features * format.item_bytes for child in linears)
    arena = Arena(sum(place + LINE for place in places))
    return pack_linears(module, lambda linear: NativeLinear(linear, kernels, format, arena))
