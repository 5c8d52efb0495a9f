"""Linear layers with prepacked weights; those of oneDNN.

Measured on two cores with AVX2, float32: the output embedding ``[49152, 576]`` at 8 rows takes 6 ms packed and 18 ms
with ``F.linear``; layer matrices gain up to 2x at 8 rows and nothing from about 128 rows on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def can_pack(dtype: torch.dtype) -> bool:
    """True where this build of torch has the packed kernels and they compute in ``dtype`` exactly as asked."""
    return dtype is torch.float32 and torch.backends.mkldnn.is_available() and hasattr(torch.ops, "mkldnn")


class Packed(nn.Module):  # type: ignore[misc]
    """``y = x W^T + b`` with W in a layout of its own. Inference only; the original weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """The bias, if there is one."""
        return self._bias

    def own_bias(self) -> Tensor:
        """The bias of a layer that has one."""
        assert self._bias is not None
        return self._bias

    def set_bias(self, bias: Tensor) -> None:
        """Replace the bias. Mutates."""
        self._bias = bias

    def pack(self, weight: Tensor) -> None:
        """Replace the weight, ``[out_features, in_features]``. Mutates."""
        raise NotImplementedError

    def plain(self) -> Tensor:
        """The weight that is computed with, ``[out_features, in_features]``: a new tensor."""
        raise NotImplementedError


class PackedLinear(Packed):
    """A linear layer in oneDNN's blocked layout. What was packed comes back bit for bit."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed: Any = None
        self.pack(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def pack(self, weight: Tensor) -> None:
        """Replace the weight, ``[out_features, in_features]``. Mutates."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def plain(self) -> Tensor:
        """The weight as it was before packing: a new tensor."""
        weight: Tensor = self._packed.to_dense()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., in_features]`` to a new ``[..., out_features]``."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def pack_linears(module: nn.Module, make: Callable[[nn.Linear], Packed] = PackedLinear) -> int:
    """Replace every plain ``nn.Linear`` below ``module``, one at a time so that no second copy of the model arises.

    A weight that is tied to the input embedding stays there too, since the embedding needs its plain rows. Mutates
    ``module``; returns how many layers were replaced.
    """
    packed = 0
    for path, child in list(module.named_modules()):
        if type(child) is nn.Linear:
            module.set_submodule(path, make(child))
            packed += 1
    return packed
