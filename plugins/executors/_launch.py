"""Steps that are launched on a device without waiting for the one before.

A row that goes on from a token of the step in flight takes it on the device, where that step has left it. What a step
has sampled comes to the host by a copy that is waited for when the outcome is asked for, and not before. So requests
that take the likeliest token, or draw from all tokens or from the likeliest few, never make the device wait.

Batches in which somebody uses ``top_p`` without a small ``top_k``, ``min_tokens``, biases, penalties or a grammar, or
wants log-probabilities, choose their tokens before ``launch`` returns: that waits for the device. The next step is
planned meanwhile all the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.core.batch import Batch
from engine.core.continuation import Row
from engine.core.errors import ExecutionError
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Attention
from engine.core.sampling import SamplingParams
from engine.plugins.executors._device import Fence, working_on
from engine.plugins.executors._graphs import Captured, DecodeGraphs, Forward
from engine.plugins.executors._paged import Layer, active
from engine.plugins.executors._sampling import INFINITY, NAN, NONE_LEFT, Sampler, Wanted
from engine.plugins.executors._sampling_draw import can_ahead, draw_ahead
from engine.plugins.executors._staging import Staging
from engine.plugins.executors._threads import threads

UNKNOWN = "the plan computes tokens that are not known yet"


def flattened(plan: Plan, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """All rows' tokens and their positions, row after row, ``[sum(counts)]``.

    Raises:
        ExecutionError: the rows have fewer than the plan counts, since some are not known yet.
    """
    ids: list[int] = []
    positions: list[int] = []
    for row, count in zip(rows, plan.counts, strict=True):
        ids += row.tokens
        positions += range(row.start, row.start + count)
    if len(ids) != len(positions):
        raise ExecutionError(UNKNOWN)
    return ids, positions


@dataclass(slots=True)
class Launched(ABC):
    """A step that a device computes, or has computed.

    Attributes:
        plan: whose step it is.
        sampling: its rows that sample.
        tokens: what those yield, on the device.
    """

    plan: Plan
    sampling: Sequence[int]
    tokens: Tensor
    places: dict[int, int] = field(init=False)  # row -> its place in ``tokens``

    def __post_init__(self) -> None:
        self.places = {row: place for place, row in enumerate(self.sampling)}

    def token(self, row: int) -> int | None:
        """What a row has yielded, ``None`` where it failed. Waits."""
        tokens = self.outcome().tokens[row]
        return tokens[0] if tokens else None

    @abstractmethod
    def outcome(self) -> Outcome:
        """What came of the step. Waits. May be asked in any thread, and again."""


@dataclass(slots=True)
class Chosen(Launched):
    """A step whose outcome is known."""

    known: Outcome

    def outcome(self) -> Outcome:
        """At once."""
        return self.known


class Coming(Launched):
    """A step whose tokens are on their way to the host, with the logits that they have."""

    def __init__(self, plan: Plan, sampling: Sequence[int], tokens: Tensor, best: Tensor) -> None:
        super().__init__(plan, sampling, tokens)
        pinned = tokens.device.type == "cuda"
        self._found = [torch.empty_like(side, device="cpu", pin_memory=pinned) for side in (tokens, best)]
        for host, side in zip(self._found, (tokens, best), strict=True):
            host.copy_(side, non_blocking=True)
        self._fence = Fence(tokens.device)
        self._fence.mark()

    def outcome(self) -> Outcome:
        """Once the device has come so far. Raises what it reports."""
        self._fence.wait()
        found, best = (side.tolist() for side in self._found)
        tokens: list[tuple[int, ...]] = [()] * len(self.plan.requests)
        errors: dict[int, str] = {}
        for row, token, value in zip(self.sampling, found, best, strict=True):
            if value > -INFINITY:
                tokens[row] = (token,)
            else:
                errors[row] = NAN if value != value else NONE_LEFT
        return Outcome(self.plan, tuple(tokens), errors)


class Launcher:
    """Launches plans, in order, one thread at a time; outcomes may be waited for in another one meanwhile.

    Args:
        attention: started.
        forward: the model, over the KV of the active layers.
        layers: whose KV it is.
        cpu_threads: how many, where the CPU is the device.

    Attributes:
        graphs: for steps of decodes alone; ``None`` until they are captured, and where there are none.
    """

    def __init__(
        self, *, device: torch.device, attention: Attention, forward: Forward, layers: Layer, sampler: Sampler,
        page_size: int, cpu_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._device, self._attention, self._forward, self._layers = device, attention, forward, layers
        self._sampler, self._page_size, self._threads = sampler, page_size, cpu_threads
        self.graphs: DecodeGraphs | None = None
        self._cascades = "attention:cascade" in attention.provides
        self._staging = Staging(device)
        self._last: Launched | None = None

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """Tell the device of a plan; what is returned waits for its outcome. Mutates KV memory.

        Raises:
            ExecutionError: a row's tokens are not all known, and no step in flight yields them.
        """
        rows = self._rows(plan)
        wanted = self._sampler.wanted(plan, rows)
        size = None if self.graphs is None else self.graphs.fitting(plan)
        with (
            threads(self._threads), working_on(self._device), torch.inference_mode(), active(self._layers),
            self._staging.step(),
        ):  # fmt: skip
            found = self._eager(plan, rows, wanted) if size is None else self._captured(plan, rows, size)
            self._last = self._choose(plan, rows, wanted, found)
        return self._last.outcome

    # ---- what is computed

    def _rows(self, plan: Plan) -> list[Row]:
        """Each row with the tokens that the host knows; 0 stands for those that only the device knows.

        Penalties are counted and grammars followed on the host: it waits for the tokens of requests that use them.
        """
        if not any(awaited >= 0 for awaited in plan.awaits):
            return [
                Row(start, request.tokens[start : start + count])
                for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True)
            ]
        rows = []
        for request, start, count, awaited in zip(plan.requests, plan.starts, plan.counts, plan.awaits, strict=True):
            if awaited < 0:
                rows.append(Row(start, request.tokens[start : start + count]))
            else:
                followed = request.params.penalised or request.guide is not None
                token = self._before.token(awaited) if followed else None
                rows.append(Row(start, (token or 0,)))
        return rows

    @property
    def _before(self) -> Launched:
        if self._last is None:
            raise ExecutionError("the plan goes on from a step that was not computed")
        return self._last

    def _captured(self, plan: Plan, rows: Sequence[Row], size: int) -> Captured:
        """Replay the graph of ``size``; what it leaves of the plan's own rows."""
        graphs = self.graphs
        assert graphs is not None
        if any(len(row.tokens) != 1 for row in rows):
            raise ExecutionError(UNKNOWN)
        count, missing = len(rows), (0,) * (size - len(rows))
        self._put_ids([*[row.tokens[0] for row in rows], *missing], plan, graphs.ids[:size])
        self._staging.put([*plan.starts, *missing], torch.long, graphs.positions[:size])
        found = graphs.replay(size, plan.starts, plan.tables)
        return Captured(*(side[:count] for side in found))

    def _eager(self, plan: Plan, rows: Sequence[Row], wanted: Wanted) -> Tensor:
        """Logits, as wanted."""
        ids, positions = flattened(plan, rows)
        put = self._staging.put
        on_device = self._put_ids(ids, plan)
        places = put(positions, torch.long)
        keep = put(wanted.keep, torch.long)
        self._attention.plan_batch(
            Batch(
                starts=[row.start for row in rows],
                counts=plan.counts,
                pages=plan.tables,
                page_size=self._page_size,
                device=self._device,
                shared=plan.common_prefix_pages if self._cascades else 0,
            )
        )
        return self._forward(on_device, places, keep)

    def _put_ids(self, ids: Sequence[int], plan: Plan, into: Tensor | None = None) -> Tensor:
        """Token ids on the device, those that only it knows put in there. Mutates ``into``."""
        awaits = plan.awaits
        put = self._staging.put
        if not any(awaited >= 0 for awaited in awaits):
            return put(ids, torch.long, into)
        last = self._before
        places = [last.places[awaited] for awaited in awaits if awaited >= 0]
        if into is not None and len(places) == len(awaits) and places == list(range(len(places))):
            into[: len(places)].copy_(last.tokens[: len(places)])  # the rows of the step before, and no others
            return into
        result = put(ids, torch.long, into)
        ends = [0]
        for count in plan.counts:
            ends.append(ends[-1] + count)
        there = [ends[row] for row, awaited in enumerate(awaits) if awaited >= 0]
        numbers = put([there, places], torch.long)
        return result.index_copy_(0, numbers[0], last.tokens.index_select(0, numbers[1]))

    # ---- what is chosen

    def _choose(self, plan: Plan, rows: Sequence[Row], wanted: Wanted, found: Tensor | Captured) -> Launched:
        logits = found.logits if isinstance(found, Captured) else found.float()
        put = self._staging.put
        params = [plan.requests[row].params for row in wanted.rows]
        if not wanted.prompts and all(unseen(wish, logits.shape[1]) for wish in params):
            best, tokens = (found.best, found.tokens) if isinstance(found, Captured) else logits.max(dim=-1)
            drawn = [at for at, wish in enumerate(params) if not wish.greedy]
            if drawn:
                wishes = [params[at] for at in drawn]
                numbers = [self._sampler.number(plan, wanted.rows[at], rows[wanted.rows[at]]) for at in drawn]
                picked = draw_ahead(logits, drawn, wishes, numbers, put)
                tokens = tokens.index_copy(0, put(drawn, torch.long), picked)
            return Coming(plan, wanted.rows, tokens, best)
        outcome = self._sampler.choose(logits, plan, rows, wanted)
        chosen = [outcome.tokens[row][0] if outcome.tokens[row] else 0 for row in wanted.rows]
        return Chosen(plan, wanted.rows, put(chosen, torch.long), outcome)


def unseen(params: SamplingParams, vocab: int) -> bool:
    """Whether the device can choose without being looked at: the likeliest token, or one drawn in a settled way."""
    if params.min_tokens or params.penalised or params.logit_bias or params.reports or params.grammar is not None:
        return False
    return params.greedy or can_ahead(params, vocab)
