"""Backend ``triton``: its kernels in the interpreter, its plans, and what it says where it cannot compute."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core import AttentionLayer, Batch, ConfigError
from engine.core.registry import make
from engine.plugins.attention import triton as plugin
from engine.plugins.attention._rows import rows_of
from engine.plugins.attention._triton_plan import padded, pieces_of, tiles_of
from engine.plugins.attention._triton_staging import Staging, packed

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_in_the_interpreter() -> None:
    """The suite of its role, and more: a process of its own, since kernels are interpreted or compiled for good."""
    file = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:xdist", str(file)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=file.parents[3])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 30


# ---- where it cannot


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("cpu", "float32", "not on the CPU: choose attention auto, or, to try its kernels, set TRITON_INTERPRET=1"),
        ("cpu", "float64", "computes float16, bfloat16, float32, not float64"),
        ("mps", "float32", r"NVIDIA GPUs \(cuda\), not on mps"),
        ("cuda", "float32", "torch sees no GPU"),
    ],
)
@needs_triton
def test_it_says_what_would_help(device: str, dtype: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=words):
        make("attention", "triton").prepare(device=device, dtype=dtype)


def test_without_triton_it_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sixhooks\[gpu\]'"):
        make("attention", "triton").prepare(device="cuda", dtype="float16")


def test_a_head_may_be_too_large() -> None:
    layer = AttentionLayer(heads=1, kv_heads=1, k_dim=64, v_dim=257, scale=1.0)
    with pytest.raises(ConfigError, match="up to 256 numbers, not 257"):
        make("attention", "triton").expect([layer])


def test_it_is_cheap_to_import() -> None:
    code = "import sys, engine.plugins.attention.triton; print([n for n in ('torch', 'triton') if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ---- plans


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_what_each_query_sees_once(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.choice((1, 1, rng.randrange(1, 70))) for _ in range(rng.randrange(1, 9))]
    starts = [rng.choice((0, rng.randrange(1, 5000))) for _ in counts]
    size, queries, window = rng.choice((1, 3, 16)), rng.choice((1, 5, 64)), rng.choice((0, 0, 1, 50, 700))
    needs = [-(-(start + count) // size) for start, count in zip(starts, counts, strict=True)]
    pages = [[rng.randrange(10**6) for _ in range(need + rng.randrange(3))] for need in needs]
    rows = rows_of(Batch(starts=starts, counts=counts, pages=pages, page_size=size))
    tiles = tiles_of(rows, np.ones(len(counts), bool), queries, window, 64)
    wanted = rng.randrange(1, 200)
    pieces = pieces_of(tiles, 64, wanted)
    assert len(pieces.items) <= wanted + len(tiles.count)
    seen: dict[int, list[tuple[int, int]]] = {}
    merged = {record[0]: set(range(record[2], record[2] + record[3])) for record in pieces.merges.tolist()}
    for token, count, position, begin, end, table, part, _ in pieces.items.tolist():
        assert begin % 64 == 0
        assert 1 <= count <= queries
        assert (part < 0) == (token not in merged)
        if part >= 0:
            merged[token].remove(part)
        for query in range(count):
            seen.setdefault(token + query, []).append((begin, end))
        row = int(np.searchsorted(rows.firsts, token, side="right")) - 1
        assert position - starts[row] == token - rows.firsts[row]
        assert rows.pages[table : table + needs[row]].tolist() == pages[row][: needs[row]]
    assert not any(merged.values())
    assert sorted(seen) == list(range(sum(counts)))
    slots = rows.slots()
    for token, ranges in seen.items():
        row = int(np.searchsorted(rows.firsts, token, side="right")) - 1
        position = starts[row] + token - int(rows.firsts[row])
        first = max(0, position - window + 1) if window else 0
        ranges.sort()
        assert ranges[0][0] <= first
        assert ranges[-1][1] > position
        assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
        assert slots[token] == pages[row][position // size] * size + position % size


def test_pieces_are_of_one_size_and_may_be_fixed() -> None:
    pages = [list(range(100))] * 3
    rows = rows_of(Batch(starts=[9999, 500, 90], counts=[1, 1, 1], pages=pages, page_size=100))
    tiles = tiles_of(rows, np.ones(3, bool), 1, 0, 64)
    lengths = np.diff(pieces_of(tiles, 64, 10).items[:, 3:5])[:, 0]
    assert lengths.tolist() == sorted(lengths, reverse=True)
    assert lengths.max() == 1088  # a tenth of all keys, up to a multiple of 64
    assert len(pieces_of(tiles, 64, 10**6).items) == 79 + 4 + 1  # none is smaller than it is worth
    assert len(pieces_of(tiles, 64, 1, fixed=512).items) == 20 + 1 + 1


def test_what_is_padded_has_nothing_to_do() -> None:
    records = padded(np.ones((2, 8), np.int32), 5)
    assert records[:, 0].tolist() == [1, 1, -1, -1, -1]
    assert not records[2:, 1:].any()


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 needs 2 pages of 4 and has 1"):
        rows_of(Batch(starts=[0, 4], counts=[2, 1], pages=[[0], [1]], page_size=4))


def test_arrays_travel_together_and_begin_where_kernels_expect_them() -> None:
    together, ends = packed([np.arange(3, dtype=np.int32), np.arange(0, dtype=np.int32), np.arange(40, dtype=np.int32)])
    assert [end.start % 32 for end in ends] == [0, 0, 0]
    sent = Staging(torch.device("cpu")).send(together)
    assert [sent[end].tolist() for end in ends] == [[0, 1, 2], [], list(range(40))]
    kept = torch.full((200,), 7, dtype=torch.int32)
    assert Staging(torch.device("cpu")).send(together, kept) is kept
    assert kept[ends[2]].tolist() == list(range(40))
    assert kept[len(together) :].unique().tolist() == [7]
