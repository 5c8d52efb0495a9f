"""ggml's quantised tensor formats, to float32.

The commonest formats are dequantised here in whole-array operations (10 times faster than the ``gguf`` package's walk
over groups of rows, and bit-identical: a test compares them); every other format goes through the package.
"""

from __future__ import annotations

import math

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engine.core.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def storage(shape: tuple[int, ...], kind: int, name: str = "tensor") -> int:
    """Bytes that a tensor of ``shape`` (slowest dimension first) takes in format ``kind``. Raises ``ModelError``."""
    try:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise ModelError(f"{name}: ggml type {kind} is not known to the gguf package installed here") from None
    count = math.prod(shape)
    if count % elements or (shape and shape[-1] % elements):
        raise ModelError(f"{name}: shape {shape} is no multiple of the format's group of {elements}")
    return int(count // elements * size)


def dequantize(raw: Bytes, kind: int) -> Floats:
    """Dequantise a tensor's raw bytes ``[nbytes]``: a new float32 array ``[elements]``. Raises ``ModelError``."""
    form = GGMLQuantizationType(kind)
    match form:
        case GGMLQuantizationType.F32:
            return raw.view("<f4").astype(np.float32)
        case GGMLQuantizationType.F16:
            return raw.view("<f2").astype(np.float32)
        case GGMLQuantizationType.Q8_0:
            groups = raw.reshape(-1, 34)
            out: Floats = np.multiply(groups[:, 2:].view(np.int8), _half(groups, 0), dtype=np.float32)
        case GGMLQuantizationType.Q4_0:
            groups = raw.reshape(-1, 18)
            out = _nibbles(groups[:, 2:])
            out -= 8
            out *= _half(groups, 0)
        case GGMLQuantizationType.Q4_1:
            groups = raw.reshape(-1, 20)
            out = _nibbles(groups[:, 4:])
            out *= _half(groups, 0)
            out += _half(groups, 2)
        case _:
            return _through_package(raw, form)
    return out.reshape(-1)


def _half(groups: Bytes, at: int) -> Floats:
    """The float16 at byte ``at`` of every group, ``[groups, 1]``."""
    return groups[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """``[groups, 16]`` bytes to ``[groups, 32]`` values 0 … 15: all low halves first, then all high ones."""
    out = np.empty((packed.shape[0], 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _through_package(raw: Bytes, form: GGMLQuantizationType) -> Floats:
    _, size = GGML_QUANT_SIZES[form]
    try:
        return np.asarray(gguf.quants.dequantize(raw.reshape(-1, size), form), dtype=np.float32).reshape(-1)
    except (NotImplementedError, KeyError) as error:
        raise ModelError(f"ggml type {form.name} cannot be dequantised by the gguf package installed here") from error
