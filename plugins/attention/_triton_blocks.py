"""Sizes of tiles, warps and stages of the kernels of backend ``triton``, by what a layer is like."""

from __future__ import annotations

from typing import NamedTuple

ALIGN = 64  # keys; every BLOCK_N divides it, and pieces and windows begin at multiples of it
LEAST = 16  # rows and columns that a product of matrices has at least
HEIGHT = 64  # of wide tiles
LOG2E = 1.4426950408889634
WRITTEN = 2048  # numbers that a program writes, of K and as many of V
STAGES = 5  # two steps of each: look up the page, load the key


class Blocks(NamedTuple):
    """Rows of a tile, keys of a block, K and V sizes of a head, warps, stages of the pipeline."""

    m: int
    n: int
    d: int
    v: int
    warps: int
    stages: int

    @staticmethod
    def height(group: int) -> int:
        """Rows of a wide tile, at least one query with all heads that share a KV head."""
        return max(HEIGHT, power(group))


def power(number: int) -> int:
    """The smallest power of two from ``number`` on that a product of matrices takes."""
    return max(LEAST, 1 << (number - 1).bit_length())


def blocks(item_bytes: int, k_dim: int, v_dim: int, group: int, wide: bool) -> Blocks:
    """What to launch with.

    Args:
        item_bytes: of a query's number.
        k_dim, v_dim: numbers of a head.
        group: query heads of one KV head.
        wide: prompts, not decodes.
    """
    d, v = power(k_dim), power(v_dim)
    m = Blocks.height(group) if wide else power(group)
    large = max(d, v) * item_bytes > 256
    n = 32 if large else 64
    warps = 8 if m * max(d, v) > 64 * 128 else 4
    return Blocks(m, n, d, v, warps, STAGES)


def lines_a_write(k_dim: int, v_dim: int) -> int:
    """Heads of tokens that one program writes: a power of two."""
    return WRITTEN // max(power(k_dim), power(v_dim))
