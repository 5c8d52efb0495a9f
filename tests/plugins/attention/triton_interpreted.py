"""Backend ``triton`` in Triton's interpreter. Kernels are for it, or for a GPU, from their import on: hence a process
of its own, which ``test_triton.py`` starts; by hand: ``TRITON_INTERPRET=1 pytest`` and the path of this file.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import AttentionLayer, Batch, ConfigError, Context, Limits, ModelError, ModelInfo
from engine.core.pages import PagePool
from engine.core.registry import make
from engine.plugins.attention import _triton
from engine.testing import AttentionSuite
from engine.testing.paged import PagedMemory, Row, Shape, dense, poisoned_memory


class TestTriton(AttentionSuite):
    """Small shapes: an interpreted program takes milliseconds."""

    plugin = "triton"
    dtypes = ("float32", "float16", "bfloat16")
    page_sizes = (1, 5, 128)
    head_shapes = ((2, 2), (6, 2), (6, 1))
    head_dims = (16, 40)
    long_context = 200
    windows = (1, 70)
    soft_caps = (2.0,)

    @classmethod
    def situations(cls):
        return super().situations()[::4]  # each type, each size of pages, each shape of heads


def test_every_kernel_is_run_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device would compile them then: narrow and wide tiles, whole and in pieces, with a window and without."""
    paged = _triton.Paged(torch.device("cpu"), 20, None)
    plain = AttentionLayer(heads=2, kv_heads=1, k_dim=16, v_dim=16, scale=1.0)
    layers = [plain, dataclasses.replace(plain, window=5, soft_cap=2.0)]
    seen: set[tuple[str, Any, bool]] = set()

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(_triton.kernels, name)

        def __getitem__(self, grid: Any) -> Any:
            def launched(*args: Any, **options: Any) -> None:
                seen.add((self.name, options.get("BLOCK_M"), bool(options.get("WINDOWED"))))
                self.kernel[grid](*args, **options)

            return launched

    for name in ("attend", "merge", "write"):
        monkeypatch.setattr(_triton.kernels, name, Noted(name))
    paged.expect(layers, "float32")
    paged.warm(layers, "float32", 16)
    assert len({kind for kind in seen if kind[0] == "attend"}) >= 2, seen
    assert len({kind for kind in seen if kind[0] == "merge"}) == 2, seen
    assert any(kind[0] == "write" for kind in seen)


@pytest.mark.slow
class TestTritonWidely(TestTriton):
    """What the other one leaves out."""

    page_sizes = (1, 2, 3, 16, 64, 128)
    head_shapes = ((8, 2), (40, 1), (5, 5), (12, 4))
    head_dims = (64, 96, 128, 256)
    long_context = 3000
    windows = (2, 64, 65, 500)
    soft_caps = (5.0, 50.0)
    seed = 1

    @classmethod
    def situations(cls):
        return AttentionSuite.situations.__func__(cls)


@pytest.mark.slow
class TestTritonInFixedPieces(TestTriton):
    options = {"split_tokens": 64}
    batch_invariant = True


# ---- what graphs need

SHAPE = Shape(heads=6, kv_heads=2, head_dim=16, page_size=5)
LAYER = {"heads": 6, "kv_heads": 2, "k_dim": 16, "v_dim": 16, "scale": 0.3}
LONGEST = 200


def ready(*windows: int | None, **options: Any) -> Any:
    backend = make("attention", "triton", options)
    assert "interpreted" in backend.prepare(device="cpu", dtype="float32")
    backend.expect([AttentionLayer(**LAYER, window=window) for window in windows])
    limits = Limits(max_model_len=LONGEST, max_batch_tokens=64, max_running=4, page_size=5, num_pages=99, vocab_size=9)
    backend.start(
        Context(limits=limits, pool=PagePool(99, 5), model=ModelInfo(name="", vocab_size=9, max_model_len=LONGEST))
    )
    return backend


def padded(memory: PagedMemory, rows: int) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch and rows of one token on a page of nobody's, which they share; and as much more of queries, K and V."""
    batch, missing = memory.batch, rows - len(memory.rows)
    scratch = next(page for page in range(999) if all(page not in table for table in memory.tables))
    larger = Batch(
        starts=[*batch.starts, *[0] * missing], counts=[1] * rows, pages=[*batch.pages, *[[scratch]] * missing],
        page_size=batch.page_size,
    )  # fmt: skip
    more = (torch.randn(missing, side.shape[1], 16) for side in (memory.query, memory.keys, memory.values))
    query, keys, values = (
        torch.cat(pair) for pair in zip((memory.query, memory.keys, memory.values), more, strict=True)
    )
    return larger, query, keys, values


def test_a_graph_computes_what_was_planned_last_for_its_rows() -> None:
    """What is captured are tensors: those of the first plan of a size must hold the numbers of the last."""
    backend, rng = ready(None, 7), random.Random(0)
    steps: dict[int, Any] = {}
    for turn in range(2):
        for rows, live in ((4, 3), (1, 1)):
            lengths = [LONGEST - 1 if not turn and not at else rng.randrange(LONGEST) for at in range(live)]
            memory = PagedMemory(SHAPE, [Row(length, 1) for length in lengths], seed=turn)
            batch, query, keys, values = padded(memory, rows)
            backend.plan_graph(batch)
            step = steps.setdefault(rows, backend._impl._step)
            assert step is backend._impl._step
            backend.write(keys, values, memory.k_pages, memory.v_pages)
            for window in (None, 7):
                with poisoned_memory():
                    answer = backend.attend(query, memory.k_pages, memory.v_pages, 0.3, window=window)
                assert not answer.isnan().any()
                for row in range(live):
                    wanted = dense(
                        query[row : row + 1], memory.row_keys[row], memory.row_values[row], lengths[row], 0.3,
                        window=window,
                    )  # fmt: skip
                    torch.testing.assert_close(answer[row : row + 1].double(), wanted, atol=2e-5, rtol=2e-5)
            with pytest.raises(RuntimeError, match="no layer of this shape was expected"):
                backend.attend(query, memory.k_pages, memory.v_pages, 0.3, window=8)
        between = PagedMemory(SHAPE, [Row(3, 1), Row(0, 4)])  # a step without a graph
        torch.testing.assert_close(between.run(backend, 0.3).double(), between.expected(0.3), atol=2e-5, rtol=2e-5)
    launches = [launch for step in steps.values() for both in step.work.values() for launch in both]
    assert len({launch.items.data_ptr() for launch in launches}) == 4


def test_graphs_need_to_know_the_layers_and_hold_one_token_a_row() -> None:
    batch = Batch(starts=[0], counts=[2], pages=[[0]], page_size=5)
    with pytest.raises(RuntimeError, match=r"expect\(\) and start\(\) come before"):
        make("attention", "triton").plan_graph(batch)
    with pytest.raises(ValueError, match="one token a row"):
        ready(None).plan_graph(batch)


def test_graphs_of_fixed_pieces_may_need_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.plugins.attention import _triton

    batch = Batch(starts=[0] * 4, counts=[1] * 4, pages=[[0]] * 4, page_size=5)
    ready(None, split_tokens=64).plan_graph(batch)
    monkeypatch.setattr(_triton, "MOST_PARTS", 10**4)
    with pytest.raises(ConfigError, match=r"split_tokens 64 cuts 4 rows of up to 200 tokens .*: raise split_tokens"):
        ready(None, split_tokens=64).plan_graph(batch)
    ready(None).plan_graph(batch)


def test_other_pages_are_refused() -> None:
    memory = PagedMemory(SHAPE, [Row(3, 1)])
    backend = ready(None)
    backend.plan_batch(memory.batch)
    with pytest.raises(ValueError, match=r"pages of torch.float32 or torch.float8_e4m3fn, not torch.float16"):
        backend.attend(memory.query, memory.k_pages.half(), memory.v_pages.half(), 0.3)
    with pytest.raises(ValueError, match="one after the other"):
        backend.attend(memory.query, memory.k_pages[::2], memory.v_pages[::2], 0.3)


def test_values_may_be_narrower_than_keys() -> None:
    memory = PagedMemory(SHAPE, [Row(200, 1), Row(4, 9)])
    v_pages = torch.full((*memory.v_pages.shape[:3], 6), torch.nan)
    narrow = [values[..., :6].contiguous() for values in memory.row_values]
    v_pages[:] = memory.v_pages[..., :6]
    backend = ready(None)
    backend.plan_batch(memory.batch)
    backend.write(memory.keys, memory.values[..., :6], memory.k_pages, v_pages)
    answer = backend.attend(memory.query, memory.k_pages, v_pages, 0.3)
    rows = ((0, 1, 200), (1, 10, 4))
    wanted = [
        dense(memory.query[first:last], memory.row_keys[row], narrow[row], start, 0.3)
        for row, (first, last, start) in enumerate(rows)
    ]
    torch.testing.assert_close(answer.double(), torch.cat(wanted), atol=2e-5, rtol=2e-5)


@pytest.mark.model
def test_the_default_model_says_what_it_says_with_the_reference() -> None:
    said = []
    for attention in ("torch", "triton"):
        try:
            llm = LLM(attention=attention, num_pages=8, max_model_len=64)
        except ModelError as error:
            pytest.skip(str(error))
        with llm:
            assert attention != "triton" or "triton" in llm.core.describe()["model"]["attention"]
            params = SamplingParams(temperature=0, max_tokens=3)
            said.append([one.text for one in llm.generate(["One, two"], params)])
    assert said[0] == said[1]
