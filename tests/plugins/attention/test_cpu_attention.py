"""The compiled backend: the same bits whatever the chunks, the batch and the threads; and the choice of a backend."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import torch

from engine.core import Batch, ConfigError, PluginError
from engine.core.native import NoKernels, why_not
from engine.core.native import kernels as native
from engine.core.registry import make
from engine.plugins.attention import cpu
from engine.plugins.attention.cpu import CPUAttention

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
HEADS, KV_HEADS, DIM, SIZE, LENGTH = 6, 2, 24, 5, 333


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Sequence:
    """One row's queries, K and V, and pages of its own for them."""

    def __init__(self, seed: int, length: int = LENGTH) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.length = length
        self.query = torch.randn(length, HEADS, DIM, generator=noise)
        self.keys, self.values = (torch.randn(length, KV_HEADS, DIM, generator=noise) for _ in range(2))
        self.pages = list(range(-(-length // SIZE)))
        random.Random(seed).shuffle(self.pages)


def answers(rows: list[Sequence], cuts: list[int]) -> list[torch.Tensor]:
    """All rows together, step by step up to each cut; what each row was answered."""
    backend, base, tables = CPUAttention(), 0, []
    for row in rows:
        tables.append([base + page for page in row.pages])
        base += len(row.pages)
    k_pages, v_pages = (torch.full((base, SIZE, KV_HEADS, DIM), torch.nan) for _ in range(2))
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        live = [at for at, row in enumerate(rows) if row.length > start]
        parts = [slice(start, min(end, rows[at].length)) for at in live]
        counts = [part.stop - part.start for part in parts]
        backend.plan_batch(
            Batch(starts=[start] * len(live), counts=counts, pages=[tables[at] for at in live], page_size=SIZE)
        )
        query, keys, values = (
            torch.cat([getattr(rows[at], name)[part] for at, part in zip(live, parts, strict=True)])
            for name in ("query", "keys", "values")
        )
        backend.write(keys, values, k_pages, v_pages)
        answer = backend.attend(query, k_pages, v_pages, 0.3)
        for at, piece in zip(live, answer.split(counts), strict=True):
            found[at].append(piece)
    return [torch.cat(pieces) for pieces in found]


@needs_kernels
@pytest.mark.usefixtures("threads")
def test_chunks_company_and_threads_change_no_bit() -> None:
    one, others = Sequence(0), [Sequence(1, 40), Sequence(2, 200)]
    torch.set_num_threads(1)
    whole = answers([one], [])[0]
    token_by_token = [*range(310, LENGTH)]
    for threads in (1, 2, 5):  # one long row is shared by threads, many short ones are not
        torch.set_num_threads(threads)
        for cuts in ([], [1, 64, 65, 200], token_by_token):
            assert torch.equal(answers([one], cuts)[0], whole), (threads, cuts)
        assert torch.equal(answers([others[0], one, others[1]], [7, 130])[1], whole), threads


@needs_kernels
def test_heads_may_share_one_kv_head_and_lie_apart() -> None:
    """More query heads than are worked on together, and queries as transformers hands them over: transposed."""
    heads, tokens = 50, 7
    query, keys, values = (torch.randn(1, n, tokens, DIM)[0].transpose(0, 1) for n in (heads, 1, 1))
    backend = CPUAttention()
    k_pages, v_pages = torch.zeros(2, SIZE, 1, DIM), torch.zeros(2, SIZE, 1, DIM)
    backend.plan_batch(Batch(starts=[0], counts=[tokens], pages=[[1, 0]], page_size=SIZE))
    backend.write(keys, values, k_pages, v_pages)
    found = backend.attend(query, k_pages, v_pages, 0.5)
    sides = (side.transpose(0, 1)[None] for side in (query, keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(*sides, is_causal=True, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


@needs_kernels
def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 needs 2 pages of 4 and has 1"):
        CPUAttention().plan_batch(Batch(starts=[0, 4], counts=[2, 1], pages=[[0], [1]], page_size=4))


@needs_kernels
def test_other_types_and_devices_are_refused() -> None:
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
        with pytest.raises(ConfigError, match=f"not {dtype} on {device}"):
            CPUAttention().prepare(device=device, dtype=dtype)


# ---- auto


@needs_kernels
def test_auto_takes_the_first_that_can() -> None:
    assert make("attention", "auto").prepare(device="cpu", dtype="float32").startswith("cpu (")
    words = make("attention", "auto").prepare(device="cpu", dtype="bfloat16")
    others = ("cpu computes float32 on the CPU", "flashinfer computes on CUDA devices", "triton computes on")
    assert re.match("torch; " + ".*; ".join(f"not attention {words}" for words in others), words)
    assert make("attention", "auto", {"order": ["torch", "cpu"]}).prepare(device="cpu", dtype="float32") == "torch"


def test_without_a_compiler_auto_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoKernels("no C++ compiler: none is installed")

    monkeypatch.setattr(cpu, "kernels", none)
    backend = make("attention", "auto", {"order": ["cpu", "torch"]})
    assert backend.prepare(device="cpu", dtype="float32") == (
        "torch; not attention cpu: no C++ compiler: none is installed"
    )
    backend.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    one = torch.ones(1, 1, 8)
    pages = torch.zeros(1, 4, 1, 8)
    backend.write(one, one, pages, pages)
    assert torch.equal(backend.attend(one, pages, pages, 1.0), one)
    backend.close()
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        CPUAttention().plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))


def test_auto_with_nobody_left_gives_every_cause() -> None:
    with pytest.raises(ConfigError, match="no attention backend of cpu can: attention cpu computes float32"):
        make("attention", "auto", {"order": ["cpu"]}).prepare(device="cuda", dtype="float16")
    with pytest.raises(ConfigError, match="cannot be among"):
        make("attention", "auto", {"order": ["auto"]}).prepare(device="cpu", dtype="float32")
    with pytest.raises(PluginError, match="unknown attention 'nobody'"):
        make("attention", "auto", {"order": ["nobody"]}).prepare(device="cpu", dtype="float32")


def test_the_kernels_are_those_of_the_process() -> None:
    if why_not() is None:
        assert native() is native()
    else:
        with pytest.raises(NoKernels):
            native()
