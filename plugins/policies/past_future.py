"""``past-future``: admit while the predicted peak of KV memory fits, so that hardly anybody is preempted.

Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025). The lengths of past
outputs are the forecast for those that run: each request is given a place in that distribution, above what it has
already. Memory peaks when somebody is about to finish; the candidate starts if no such peak exceeds the pool.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from zlib import crc32

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome, Wait
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView

PATIENCE = 8  # steps after which a refusal is thought over though nobody left, and what runs is surveyed

Future = tuple[float, float]  # tokens still to come, tokens now


class PastFuture(Policy):
    """Objects to starts that would, by the lengths of past outputs, lead to more KV than the pool holds.

    Once a candidate waits, those behind it wait too, so nobody is overtaken for being small.
    """

    name = "past-future"

    class Options(PluginOptions):
        history: int = Field(512, ge=1, description="past outputs to forecast from")
        warmup: int = Field(16, ge=1, description="no objection before so many outputs were seen")
        reserve: float = Field(0.03, ge=0, lt=1, description="share of the pool to keep free of forecast")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._recent: deque[int] = deque()
        self._lengths: list[int] = []  # the same, sorted
        self._surveyed = -PATIENCE  # the step of ``_futures``
        self._futures: list[Future] = []  # of all that run, and of those admitted since
        self._total = 0.0  # tokens that they would hold if all were at their longest at once
        self._share = 1.0  # of the tokens that run, what really takes pages: prefixes are shared
        self._closed: tuple[int, int] | None = None  # (step, free slots) of the last refusal

    @hookimpl
    def admit(self, step: StepView, request: Request) -> Wait | None:
        """Wait, if the peak with this one added exceeds the pool."""
        slots = step.slots
        if len(self._lengths) < self.options.warmup:
            return None
        closed = self._closed
        if closed is not None and closed[1] == slots and 0 <= step.index - closed[0] < PATIENCE:
            return Wait("no room in the forecast for those before it")
        numbers = step.kv
        pool = numbers.total * numbers.page_size * (1 - float(self.options.reserve))
        future = self._future(request, numbers.page_size)
        if not 0 <= step.index - self._surveyed < PATIENCE:
            self._survey(step)
        if self._total + sum(future) > pool and self._surveyed != step.index:  # those that ended are counted too
            self._survey(step)
        if self._total + sum(future) > pool and self._futures:  # all at once would not fit; do they meet?
            expected = peak([*self._futures, future], self._share)
            if expected > pool:
                self._closed = (step.index, slots)
                return Wait(f"forecast: {expected:.0f} tokens of KV at the peak, {pool:.0f} is the limit")
        self._futures.append(future)
        self._total += sum(future)
        self._closed = None
        return None

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Remember how long the outputs were."""
        for request in outcome.finished:
            if request.pooling is not None:
                continue  # it has none
            self._recent.append(request.num_output)
            insort(self._lengths, request.num_output)
            if len(self._recent) > self.options.history:
                del self._lengths[bisect_right(self._lengths, self._recent.popleft()) - 1]

    def _survey(self, step: StepView) -> None:
        """The futures of all that run."""
        numbers, running = step.kv, step.running
        self._surveyed = step.index
        self._futures = [self._future(request, numbers.page_size) for request in running]
        self._total = sum(map(sum, self._futures))
        held = sum(len(request.pages) for request in running)
        self._share = min(1.0, numbers.pinned / held) if held else 1.0

    def _future(self, request: Request, page_size: int) -> Future:
        """What is to come is drawn from the past, by a number that belongs to the request: the same in every step."""
        have, lengths = request.num_output, self._lengths
        longer = bisect_right(lengths, have)
        luck = crc32(request.id.encode()) / 2**32
        total = lengths[longer + int(luck * (len(lengths) - longer))] if longer < len(lengths) else request.max_new
        return max(0.0, float(min(total, request.max_new) - have)), request.num_tokens + page_size / 2


def peak(futures: Iterable[Future], share: float = 1.0) -> float:
    """Most tokens held at once by requests of which each holds ``now`` and grows by ``coming``.

    ``share`` of what they hold now takes memory; what comes is nobody else's.
    """
    held = most = 0.0
    for running, (coming, now) in enumerate(sorted(futures, reverse=True), 1):
        held += share * now
        most = max(most, held + coming * running)
    return most
