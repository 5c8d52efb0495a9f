"""What of the kernels of backend ``triton`` is compiled in: sizes of tiles, warps, stages, by what a layer is like."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

ALIGN = 64  # keys; every BLOCK_N divides it, and pieces and windows begin at multiples of it
LEAST = 16  # rows and columns that a product of matrices has at least
HEIGHT = MappingProxyType({"float16": 64, "bfloat16": 64, "float32": 32})  # rows of a wide tile
KEYS = MappingProxyType({False: 16384, True: 8192})  # bytes of a block of K: narrow, wide; more would spill
LOG2E = 1.4426950408889634
WRITTEN = 2048  # numbers that a program writes, of K and as many of V
STAGES = 5  # of the pipeline: two steps ahead with the page of a key, two with the key
BYTES = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4})


class Variant(NamedTuple):
    """What decides how ``attend`` and ``merge`` are compiled.

    Attributes:
        dtype: of queries.
        group: query heads of one KV head.
        page: tokens a page.
        wide: prompts; else decodes, and a few drafts.
        fp8: pages are of fp8.
    """

    dtype: str
    group: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page: int
    wide: bool = False
    windowed: bool = False
    capped: bool = False
    fp8: bool = False


def power(number: int) -> int:
    """The smallest power of two from ``number`` on that a product of matrices takes."""
    return max(LEAST, 1 << (number - 1).bit_length())


def height(dtype: str, group: int, wide: bool) -> int:
    """Rows of a tile, at least one query with all heads that share a KV head."""
    return max(HEIGHT[dtype] if wide else LEAST, power(group))


@lru_cache(maxsize=1024)
def attend_sizes(variant: Variant, interpreted: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants of ``attend``, and its warps and stages. Not to be changed."""
    rows, larger = height(variant.dtype, variant.group, variant.wide), power(max(variant.k_dim, variant.v_dim))
    keys = KEYS[variant.wide] // (larger * BYTES[variant.dtype])
    constants = {
        **merge_sizes(variant),
        "DIM": variant.k_dim, "BLOCK_D": power(variant.k_dim), "BLOCK_N": max(LEAST, min(ALIGN, keys)),
        "PAGE": variant.page,
        "WINDOWED": variant.windowed, "CAPPED": variant.capped, "FP8": variant.fp8,
        "PRECISION": "ieee" if variant.dtype == "float32" else "tf32",
        "WIDEN": interpreted and variant.dtype == "bfloat16",
    }  # fmt: skip
    return constants, {"num_warps": 8 if rows * larger > 64 * 128 else 4, "num_stages": STAGES}


@lru_cache(maxsize=1024)
def merge_sizes(variant: Variant) -> dict[str, Any]:
    """Constants of ``merge``. Not to be changed."""
    return {
        "GROUP": variant.group, "KV_HEADS": variant.kv_heads, "V_DIM": variant.v_dim,
        "BLOCK_M": height(variant.dtype, variant.group, variant.wide), "BLOCK_V": power(variant.v_dim),
    }  # fmt: skip


@lru_cache(maxsize=1024)
def write_sizes(kv_heads: int, k_dim: int, v_dim: int, fp8: bool) -> dict[str, Any]:
    """Constants of ``write``. Not to be changed."""
    larger = power(max(k_dim, v_dim))
    return {
        "KV_HEADS": kv_heads, "DIM": k_dim, "V_DIM": v_dim, "BLOCK_R": WRITTEN // larger, "BLOCK_D": power(k_dim),
        "BLOCK_V": power(v_dim), "FP8": fp8,
    }  # fmt: skip
