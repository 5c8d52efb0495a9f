"""Products of the compiled kernels, against float64; a row's answer is the same in any company, bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.core.native import Kernels, LinearSpec, kernels, why_not
from engine.core.native.kernels import Format

Floats = NDArray[np.float32]
STORAGE = {Format.float32: np.float32, Format.bfloat16: np.uint16, Format.int8: np.int8}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    return kernels()


class Matrix:
    """A packed matrix ``[n, k]`` and its memory."""

    def __init__(self, compiled: Kernels, weight: Floats, format: Format, bias: Floats | None = None) -> None:
        self.n, self.k = weight.shape
        columns = -(-self.n // compiled.lanes) * compiled.lanes
        self.memory = np.zeros(columns * self.k, STORAGE[format])
        self.scale, self.bias = np.zeros(columns, np.float32), np.zeros(columns, np.float32)
        if bias is not None:
            self.bias[: self.n] = bias
        self.spec = LinearSpec(
            weight=self.memory.ctypes.data, scale=self.scale.ctypes.data, n=self.n, k=self.k, format=int(format),
            bias=None if bias is None else self.bias.ctypes.data,
        )  # fmt: skip
        self._compiled = compiled
        compiled.pack(np.ascontiguousarray(weight).ctypes.data, ctypes.byref(self.spec))

    def plain(self) -> Floats:
        out = np.empty((self.n, self.k), np.float32)
        self._compiled.unpack(ctypes.byref(self.spec), out.ctypes.data)
        return out

    def times(self, x: Floats, threads: int = 1) -> Floats:
        y = np.full((len(x), self.n), np.nan, np.float32)
        self._compiled.linear(ctypes.byref(self.spec), x.ctypes.data, self.k, len(x), y.ctypes.data, threads)
        return y


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 50), (64, 576), (150, 33), (33, 1536)])
def test_products_are_those_of_the_stored_matrix(compiled: Kernels, format: Format, n: int, k: int) -> None:
    matrix = Matrix(compiled, random(n, k), format, bias=random(n))
    for rows in (1, 2, 5, 6, 7, 13, 40, 200):
        x = random(rows, k, seed=1)
        expected = x.astype(float) @ matrix.plain().astype(float).T + matrix.bias[:n]
        assert np.abs(matrix.times(x) - expected).max() < 2e-6 * k**0.5 * np.abs(expected).max() + 1e-6


@pytest.mark.parametrize("format", list(Format))
def test_a_row_does_not_depend_on_its_company_or_the_threads(compiled: Kernels, format: Format) -> None:
    matrix, x = Matrix(compiled, random(150, 301), format, bias=random(150)), random(90, 301, seed=1)
    alone = np.concatenate([matrix.times(x[row : row + 1]) for row in range(len(x))])
    for rows in (2, 3, 7, 31, 90):
        for threads in (1, 2, 3):
            assert (matrix.times(x[:rows], threads) == alone[:rows]).all(), (rows, threads)


def test_formats_store_what_they_say(compiled: Kernels) -> None:
    weight = random(50, 40) * 3
    assert (Matrix(compiled, weight, Format.float32).plain() == weight).all()
    rounded = Matrix(compiled, weight, Format.bfloat16).plain()
    assert np.abs(rounded / weight - 1).max() <= 2**-8
    assert (Matrix(compiled, rounded, Format.bfloat16).plain() == rounded).all()
    steps = np.abs(weight).max(1, keepdims=True) / 127
    assert (np.abs(Matrix(compiled, weight, Format.int8).plain() - weight) <= steps * 0.501).all()
    zeros = np.zeros((3, 4), np.float32)
    assert (Matrix(compiled, zeros, Format.int8).plain() == zeros).all()


def test_bfloat16_rounds_to_the_nearest_even(compiled: Kernels) -> None:
    halves = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FC00000]], np.uint32)
    found = Matrix(compiled, halves.view(np.float32), Format.bfloat16).plain().view(np.uint32)[0] >> 16
    assert [hex(value) for value in found] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fc0"]


def test_nothing_is_computed_of_no_rows(compiled: Kernels) -> None:
    assert Matrix(compiled, random(4, 4), Format.float32).times(random(0, 4), threads=2).shape == (0, 4)


@pytest.mark.parametrize("width", [1, 7, 300, 49152])
def test_the_first_of_the_largest_is_found(compiled: Kernels, width: int) -> None:
    x = np.random.default_rng(width).integers(-50, 50, (10, width)).astype(np.float32)
    x[1] = -np.inf
    x[2, width // 2] = np.inf
    x[3, width - 1] = np.nan
    x[9, width // 2 :] = np.nan
    where = np.empty(len(x), np.int64)
    compiled.largest(x.ctypes.data, len(x), width, where.ctypes.data, 2)
    best, good = x[range(len(x)), where], [row for row in range(len(x)) if row not in (3, 9)]
    assert np.isnan(best[[3, 9]]).all()
    assert (best[good] == x[good].max(1)).all()
    assert (where == x.argmax(1)).all()  # numpy's is that of the first NaN, too


def test_a_forked_child_computes_too() -> None:
    """Its parent's threads are not there."""
    code = """
import os, ctypes, numpy as np
from engine.core.native import kernels
compiled = kernels()
x, where = np.arange(4e5, dtype=np.float32).reshape(4, -1), np.empty(4, np.int64)
run = lambda: compiled.largest(x.ctypes.data, 4, x.shape[1], where.ctypes.data, 3)
run()
child = os.fork()
if not child:
    where[:] = 0
    run()
    os._exit(0 if x[3, where[3]] == 399999 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
