"""Rows of requests that pool: whose hidden states they need, and the sums of those on their way to the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.plan import Outcome, Plan
from engine.plugins.executors._device import Fence

NAN = "the model's hidden states are not finite numbers"


class Span(NamedTuple):
    """A row of the plan, and which of the wanted states are its."""

    row: int
    first: int
    end: int


class States(NamedTuple):
    """Which hidden states a plan needs.

    Attributes:
        places: indices into the flattened batch.
        spans: whose they are.
    """

    places: list[int]
    spans: list[Span]


NOTHING = States([], [])


def wanted_states(plan: Plan) -> States:
    """Those of the positions that ``Plan.pooled_positions`` names, row after row."""
    if not plan.pooled:
        return NOTHING
    states, firsts = States([], []), [0, *accumulate(plan.counts)]
    for row in plan.pooled:
        if positions := plan.pooled_positions(row):
            before, shift = len(states.places), firsts[row] - plan.starts[row]
            states.places.extend(at + shift for at in positions)
            states.spans.append(Span(row, before, len(states.places)))
    return states


def summed(spans: list[Span], states: Tensor) -> Tensor:
    """The sums, float32 ``[spans, width]``, where the states are."""
    return torch.stack([states[span.first : span.end].sum(0, dtype=torch.float32) for span in spans])


class Sums:
    """Sums of ``states [wanted, width]``, one for each span, on their way to the host."""

    def __init__(self, spans: list[Span], states: Tensor) -> None:
        self._spans = spans
        sums = summed(spans, states)
        self._host = torch.empty_like(sums, device="cpu", pin_memory=sums.device.type == "cuda")
        self._host.copy_(sums, non_blocking=True)
        self._fence = Fence(sums.device)
        self._fence.mark()

    def join(self, outcome: Outcome) -> Outcome:
        """The outcome with them. Waits for the device. Rows with sums that are no numbers fail."""
        self._fence.wait()
        good = self._host.isfinite().all(dim=1).tolist()
        vectors = self._host.numpy()
        return replace(
            outcome,
            pooled={span.row: vectors[at] for at, span in enumerate(self._spans) if good[at]},
            errors={**outcome.errors, **{span.row: NAN for at, span in enumerate(self._spans) if not good[at]}},
        )
