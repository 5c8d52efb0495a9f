"""The reference backend against dense attention in float64, on memory where every stray read is poison."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.batch import Batch
from engine.plugins.attention._reference import GROUP_SLACK, group_by_length
from engine.plugins.attention.torch import TorchAttention

POISON = float("nan")


class Memory:
    """One layer's pages, all poison, and rows that own random pages of it in random order."""

    def __init__(
        self, rng: np.random.Generator, lengths: list[int], page_size: int, kv_heads: int, dims: tuple[int, int]
    ):
        self.page_size, self.kv_heads, self.dims = page_size, kv_heads, dims
        needs = [-(-length // page_size) for length in lengths]
        order = rng.permutation(sum(needs) + 5).tolist()
        self.tables = [[order.pop() for _ in range(need)] for need in needs]
        shape = (sum(needs) + 5, page_size, kv_heads)
        self.k_pages = torch.full((*shape, dims[0]), POISON)
        self.v_pages = torch.full((*shape, dims[1]), POISON)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        self.keys = [torch.randn(length, kv_heads, dims[0], generator=generator) for length in lengths]
        self.values = [torch.randn(length, kv_heads, dims[1], generator=generator) for length in lengths]

    def fill(self, row: int, upto: int) -> None:
        """What earlier steps have written: the first ``upto`` positions of a row."""
        for position in range(upto):
            page, offset = self.tables[row][position // self.page_size], position % self.page_size
            self.k_pages[page, offset] = self.keys[row][position]
            self.v_pages[page, offset] = self.values[row][position]


def dense(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of one row in float64, by the definition."""
    share = query.shape[1] // keys.shape[1]
    k, v = (side.double().repeat_interleave(share, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    allowed = torch.arange(keys.shape[0])[None] <= start + torch.arange(query.shape[0])[:, None]
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def check(memory: Memory, starts: list[int], counts: list[int], heads: int, scale: float = 0.3) -> None:
    for row, start in enumerate(starts):
        memory.fill(row, start)
    spans = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    query = torch.randn(sum(counts), heads, memory.dims[0], generator=torch.Generator().manual_seed(1))
    backend = TorchAttention()
    backend.plan_batch(Batch(starts=starts, counts=counts, pages=memory.tables, page_size=memory.page_size))
    new_keys = torch.cat([keys[span] for keys, span in zip(memory.keys, spans, strict=True)])
    new_values = torch.cat([values[span] for values, span in zip(memory.values, spans, strict=True)])
    backend.write(new_keys, new_values, memory.k_pages, memory.v_pages)
    out = backend.attend(query, memory.k_pages, memory.v_pages, scale)
    assert out.shape == (sum(counts), heads, memory.dims[1])
    first = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        keys, values = memory.keys[row][: start + count], memory.values[row][: start + count]
        expected = dense(query[first : first + count], keys, values, start, scale)
        torch.testing.assert_close(out[first : first + count].double(), expected, atol=2e-5, rtol=2e-5)
        first += count


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (9, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_ragged_batches_equal_dense_attention(page_size: int, heads: int, kv_heads: int, seed: int) -> None:
    """Fresh prefills, chunks behind a context and decodes, mixed in random order, some pages longer than needed."""
    rng = np.random.default_rng(seed)
    starts, counts = [], []
    for _ in range(int(rng.integers(1, 9))):
        kind = rng.integers(3)
        starts.append(0 if kind == 0 else int(rng.integers(1, 300)))
        counts.append(1 if kind == 2 else int(rng.integers(2, 40)))
    spare = int(rng.integers(0, 20))
    lengths = [start + count + spare for start, count in zip(starts, counts, strict=True)]
    check(Memory(rng, lengths, page_size, kv_heads, (8, 8)), starts, counts, heads)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [1, 1], [1, 400, 30, 399, 200], list(range(1, 33))])
def test_decodes_alone_together_and_of_any_length(lengths: list[int]) -> None:
    memory = Memory(np.random.default_rng(0), lengths, 16, 1, (8, 8))
    check(memory, [length - 1 for length in lengths], [1] * len(lengths), heads=3)


def test_values_may_be_narrower_than_keys() -> None:
    memory = Memory(np.random.default_rng(0), [20, 9, 12], 4, 2, (8, 6))
    check(memory, [0, 8, 5], [20, 1, 7], heads=4)


def test_a_row_reads_what_another_row_of_the_same_step_writes() -> None:
    """Twins: the second row's first page is the page that the first row computes in this very step."""
    memory = Memory(np.random.default_rng(0), [4, 6], 4, 1, (8, 8))
    memory.tables[1][0] = memory.tables[0][0]
    memory.keys[1][:4], memory.values[1][:4] = memory.keys[0], memory.values[0]
    query = torch.randn(6, 2, 8)
    backend = TorchAttention()
    backend.plan_batch(Batch(starts=[0, 4], counts=[4, 2], pages=memory.tables, page_size=4))
    keys, values = (torch.cat([side[0], side[1][4:]]) for side in (memory.keys, memory.values))
    backend.write(keys, values, memory.k_pages, memory.v_pages)
    out = backend.attend(query, memory.k_pages, memory.v_pages, 0.3)
    expected = dense(query[4:], memory.keys[1], memory.values[1], 4, 0.3)
    torch.testing.assert_close(out[4:].double(), expected, atol=2e-5, rtol=2e-5)


def test_a_poisoned_row_harms_itself_alone() -> None:
    memory = Memory(np.random.default_rng(0), [20, 25, 22], 4, 1, (8, 8))
    for row, upto in enumerate([19, 24, 21]):
        memory.fill(row, upto)
    memory.k_pages[memory.tables[1][0]] = POISON
    backend = TorchAttention()
    backend.plan_batch(Batch(starts=[19, 24, 21], counts=[1, 1, 1], pages=memory.tables, page_size=4))
    backend.write(torch.ones(3, 1, 8), torch.ones(3, 1, 8), memory.k_pages, memory.v_pages)
    out = backend.attend(torch.randn(3, 2, 8), memory.k_pages, memory.v_pages, 0.3)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_writing_touches_the_planned_slots_only() -> None:
    memory = Memory(np.random.default_rng(0), [5], 4, 1, (8, 8))
    backend = TorchAttention()
    backend.plan_batch(Batch(starts=[3], counts=[2], pages=memory.tables, page_size=4))
    backend.write(memory.keys[0][3:], memory.values[0][3:], memory.k_pages, memory.v_pages)
    written = ~memory.k_pages.isnan().flatten(2).any(2)
    first, second = memory.tables[0]
    assert written.nonzero().tolist() == sorted([[first, 3], [second, 0]])


def test_a_page_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 9 tokens has 2 pages of 4"):
        TorchAttention().plan_batch(Batch(starts=[8], counts=[1], pages=[[0, 1]], page_size=4))


def test_padding_is_bounded() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 200).tolist()
    groups = group_by_length([(length, row) for row, length in enumerate(lengths)])
    assert sorted(row for group in groups for _, row in group) == list(range(200))
    for group in groups:
        longest, shortest = group[0][0], group[-1][0]
        assert longest <= 2 * shortest or longest - shortest <= GROUP_SLACK
    assert len(groups) < 12
