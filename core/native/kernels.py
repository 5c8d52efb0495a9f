"""The compiled kernels, as Python sees them. Addresses are of float32 in memory that lives as long as it is used."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import lru_cache
from typing import Any

from engine.core.native.build import NoKernels, built


class Format(IntEnum):
    """How the numbers of a matrix are stored: 4, 2 or 1 bytes each; int8 with one scale for each row of the matrix."""

    float32 = 0
    bfloat16 = 1
    int8 = 2

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return (4, 2, 1)[self]


class LinearSpec(ctypes.Structure):
    """A matrix ``[n, k]`` in panels, its scales, its bias: addresses, 0 where there is none."""

    _fields_ = (
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("n", c_int64), ("k", c_int64),
        ("format", c_int32), ("pad", c_int32),
    )  # fmt: skip


class LayerSpec(ctypes.Structure):
    """A decoder layer: norms ``[width]``, norms of heads ``[dim]`` (or 0), its matrices, its heads."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, LinearSpec) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("eps", c_float), ("pad", c_float),
    )  # fmt: skip


class PagedBatch(ctypes.Structure):
    """Addresses of int64 ``starts, counts, firsts, offsets [rows]`` and int32 ``pages``: the tables row after row."""

    _fields_ = (
        *((name, c_void_p) for name in ("starts", "counts", "firsts", "offsets", "pages")),
        ("rows", c_int64), ("page_size", c_int64),
    )  # fmt: skip


class LayersSpec(ctypes.Structure):
    """All layers of a decoder: addresses of ``LayerSpec [count]``, of float scales of scores ``[count]``, and of the
    addresses of K and then V of each, ``[2 count]``."""

    _fields_ = (("layers", c_void_p), ("scales", c_void_p), ("pages", c_void_p), ("count", c_int64))


class Rooms(ctypes.Structure):
    """Addresses of memory for what is between the parts of a layer."""

    _fields_ = tuple((name, c_void_p) for name in ("q", "k", "v", "attended", "scratch", "hidden"))


class PagedShape(ctypes.Structure):
    """Heads and their sizes."""

    _fields_ = tuple((name, c_int64) for name in ("heads", "kv_heads", "k_dim", "v_dim"))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack": (c_void_p, c_void_p),
    "unpack": (c_void_p, c_void_p),
    "linear": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    "before": (c_void_p, c_void_p, c_int64, *[c_void_p] * 6, c_int),
    "after": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    "layers": (*[c_void_p] * 3, c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int),
    "norm": (c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "largest": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "write": (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int),
    "attend": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_int),
}


class Kernels:
    """The functions of ``src/kernels.cpp``, by their names there without ``kernels_``; the sources say what they take.

    They let go of the interpreter's lock, and may be called from several threads: one computes at a time.

    Attributes:
        lanes: columns of a panel.
    """

    pack: Any
    unpack: Any
    linear: Any
    before: Any
    after: Any
    layers: Any
    norm: Any
    largest: Any
    write: Any
    attend: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lanes: int = library.kernels_lanes()
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"kernels_{name}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)


@lru_cache(maxsize=1)
def _loaded() -> Kernels | NoKernels:
    try:
        return Kernels(ctypes.CDLL(str(built())))
    except NoKernels as error:
        return error
    except OSError as error:
        return NoKernels(f"the compiled CPU kernels cannot be loaded: {error}")


def kernels() -> Kernels:
    """The kernels of this process; the first call may compile them. Raises ``NoKernels``, always for the same cause."""
    found = _loaded()
    if isinstance(found, NoKernels):
        raise NoKernels(str(found))
    return found


def why_not() -> str | None:
    """Why there are no kernels here; ``None`` where there are. The first call may compile them."""
    found = _loaded()
    return str(found) if isinstance(found, NoKernels) else None
