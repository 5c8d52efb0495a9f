"""Decode steps as graphs: one for each of a few numbers of rows; a step takes the smallest that it fits into.

What is missing to that number are rows of one token in the scratch page: one page that the executor has beyond the
pool's, and that nobody is ever given. They write there, and nobody looks at what they are answered.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.batch import Batch
from engine.core.plan import Plan
from engine.plugins.executors._replay import Capture, Run

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Token ids, positions, which of them are wanted: the logits of those."""


class Captured(NamedTuple):
    """What a replay leaves, ``[rows of the graph, …]``, until the next one of any size."""

    logits: Tensor  # float32
    best: Tensor  # the highest logit of each row
    tokens: Tensor  # where it is


class DecodeGraphs:
    """Captures when it is made: that takes a second for each size, and the memory of the largest.

    Args:
        sizes: numbers of rows.
        scratch: the page of padding rows.
        plan: ``Attention.plan_graph``.
        forward: the model, over the KV of the active layers.

    Attributes:
        ids, positions: what a step computes, ``[largest size]``: the first rows are read.
    """

    def __init__(
        self, *, sizes: Sequence[int], device: torch.device, scratch: int, page_size: int,
        plan: Callable[[Batch], None], forward: Forward, capture: Capture,
    ) -> None:  # fmt: skip
        self.sizes = sorted(set(sizes))
        self._device, self._scratch, self._page_size, self._plan = device, scratch, page_size, plan
        self.ids, self.positions = torch.zeros(2, self.sizes[-1], dtype=torch.long, device=device).unbind()
        self._everything = torch.arange(self.sizes[-1], device=device)  # graphs read it as long as they live

        def work(size: int) -> Captured:
            logits = forward(self.ids[:size], self.positions[:size], self._everything[:size]).float()
            best, tokens = logits.max(dim=-1)
            return Captured(logits, best, tokens)

        self._replays: dict[int, Run] = {}
        for size in reversed(self.sizes):  # the largest first: the others find room in its memory
            self._replays[size] = capture(partial(self._rows, size, (), ()), partial(work, size))

    def fitting(self, plan: Plan) -> int | None:
        """The size that this plan fits into; ``None`` where it is none of decodes alone, or too large."""
        rows = len(plan.requests)
        if rows > self.sizes[-1] or plan.total_tokens != rows or not all(plan.samples):
            return None
        return self.sizes[bisect.bisect_left(self.sizes, rows)]

    def replay(self, size: int, starts: Sequence[int], tables: Sequence[Sequence[int]]) -> Captured:
        """Compute these rows, whose ids and positions are in place, in the graph of ``size``. Mutates KV memory."""
        self._rows(size, starts, tables)
        return Captured(*self._replays[size]())

    def _rows(self, size: int, starts: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Tell the backend of these rows and of as many padding rows as are missing."""
        missing = size - len(starts)
        batch = Batch(
            starts=[*starts, *itertools.repeat(0, missing)],
            counts=[1] * size,
            pages=[*tables, *itertools.repeat([self._scratch], missing)],
            page_size=self._page_size,
            device=self._device,
        )
        self._plan(batch)
