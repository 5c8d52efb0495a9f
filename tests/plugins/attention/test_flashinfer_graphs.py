"""Backend ``flashinfer`` in CUDA graphs, on stand-ins for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_kit import ROWS, SHARING, SMALL, OnStandIn, close, expected, memory
from graph_standin import capturing

from engine.core import AttentionLayer, Batch, Context, Limits, ModelInfo
from engine.testing.paged import PagedMemory


def told(cls: Any, *, window: int | None = None, max_model_len: int = 64) -> Any:
    """A backend that knows a model of two kinds of layers."""
    backend = cls(cls.Options(**SMALL, **SHARING))
    backend.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))  # as prepare() would, it makes the rest
    layers = [
        AttentionLayer(heads=8, kv_heads=2, k_dim=64, v_dim=64, scale=0.2, window=each) for each in (None, window)
    ]
    backend.expect(layers)
    limits = Limits(
        max_model_len=max_model_len, max_batch_tokens=64, max_running=8, page_size=4, num_pages=99, vocab_size=9
    )
    backend.start(Context(limits=limits, pool=None, model=ModelInfo(name="m", vocab_size=9, max_model_len=64)))
    return backend


class Static:
    """Tensors that a graph of so many rows works on, and pages for all graphs."""

    def __init__(self, rows: int, k_pages: torch.Tensor, v_pages: torch.Tensor) -> None:
        self.query = torch.zeros(rows, 8, 64, dtype=torch.bfloat16)
        self.keys, self.values = (torch.zeros(rows, 2, 64, dtype=torch.bfloat16) for _ in range(2))
        self.k_pages, self.v_pages = k_pages, v_pages

    def layer(self, backend: Any, window: int | None) -> torch.Tensor:
        backend.write(self.keys, self.values, self.k_pages, self.v_pages)
        features = {} if window is None else {"window": window}
        return backend.attend(self.query, self.k_pages, self.v_pages, 0.2, **features)


def padded(given: PagedMemory, rows: int, scratch: int) -> Batch:
    """The step's rows, and rows of one token on a page that nobody owns."""
    batch, more = given.batch, rows - len(given.rows)
    return Batch(
        starts=[*batch.starts, *[0] * more], counts=[1] * rows, pages=[*batch.pages, *[[scratch]] * more], page_size=4
    )


@pytest.mark.parametrize("window", [None, 6])
def test_a_graph_computes_what_was_planned_last(window: int | None, flashinfer_class: Any) -> None:
    """Captured once for each size, replayed for other rows: nothing that was known when it was captured remains."""
    backend, scratch = told(flashinfer_class, window=window), 200
    k_pages, v_pages = (torch.zeros(scratch + 1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    graphs = {}
    for rows in (6, 3):
        static = Static(rows, k_pages, v_pages)
        backend.plan_graph(Batch(starts=[0] * rows, counts=[1] * rows, pages=[[scratch]] * rows, page_size=4))
        static.layer(backend, window)
        with capturing() as graph:
            out = static.layer(backend, window)
        graphs[rows] = static, graph, out
    for step, lengths in enumerate([[7, 30, 1, 44, 12, 63], [3, 50], [9, 8, 7], [63], [5, 6, 7, 8]]):
        given = memory([(length - 1, 1) for length in lengths], shared=4 * (step % 2), seed=step)
        static, graph, out = graphs[3 if len(lengths) <= 3 else 6]
        for mine, theirs in ((k_pages, given.k_pages), (v_pages, given.v_pages)):
            mine.fill_(torch.nan)
            mine[: len(theirs)] = theirs
            mine[scratch] = 0
        for mine, theirs in ((static.query, given.query), (static.keys, given.keys), (static.values, given.values)):
            mine.zero_()[: len(lengths)] = theirs
        out.fill_(torch.nan)
        backend.plan_graph(padded(given, len(out), scratch))
        graph.replay()
        close(out[: len(lengths)], expected(given, 0.2, window, None))
        assert not out.isnan().any()
        other = memory(ROWS, shared=32, seed=step)  # an eager step between two replays
        close(other.run(backend, 0.2), expected(other, 0.2, None, None))


def test_what_a_graph_was_not_planned_for_is_an_error() -> None:
    backend = told(OnStandIn)
    fresh = OnStandIn(OnStandIn.Options(**SMALL))
    fresh.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    with pytest.raises(RuntimeError, match=r"expect\(\) and start\(\) come before plan_graph"):
        fresh.plan_graph(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    batch = Batch(starts=[0, 0], counts=[1, 1], pages=[[0], [0]], page_size=4)
    backend.plan_graph(batch)
    static = Static(2, *(torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(2)))
    with pytest.raises(RuntimeError, match="no layer like"):
        static.layer(backend, window=3)
    backend.plan_batch(batch)
    with pytest.raises(RuntimeError, match="cannot be captured"), capturing():
        static.layer(backend, None)
    with pytest.raises(ValueError, match="a row has 17 pages, more than 16"):
        backend.plan_graph(Batch(starts=[64], counts=[1], pages=[list(range(17))], page_size=4))
