"""Applying a plan's outcome to its requests: progress, tokens, and who ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.core.plan import Delta, Outcome
from engine.core.pooling import Vector
from engine.core.protocols import KVCache, Limits
from engine.core.request import Finish, Request, State
from engine.core.sampling import TokenLogprobs
from engine.core.stats import Counters


def finish(request: Request, reason: Finish, detail: str | None, counters: Counters) -> None:
    """Mark a request as ended. What it holds is returned by the core, after everybody was told. Mutates."""
    request.state = State.FINISHED
    request.quiet = 0
    request.finish = reason
    request.detail = detail
    counters.ended(reason)


def delta(request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Delta:
    """What is new of a request."""
    num_prompt = request.num_prompt
    output = len(request.tokens) - num_prompt
    prompt = tuple(request.prompt_logprobs) if tokens and output == len(tokens) else ()
    return Delta(
        request.id, tuple(tokens), request.finish, request.detail, request.cached_tokens, num_prompt, output,
        tuple(logprobs[: len(tokens)]), prompt,
    )  # fmt: skip


def _pool(request: Request, vector: Vector) -> bool:
    """Take in what a row of a request that pools brought; True where its prompt is computed. Mutates."""
    total = vector.astype(np.float64)
    request.pooled = total if request.pooled is None else request.pooled + total
    return request.computed == request.num_prompt


def _remember(request: Request, start: int, found: Sequence[TokenLogprobs]) -> None:
    """Keep what is new of the prompt's log-probabilities; ``found`` begins at the token after ``start``. Mutates.

    A request that was preempted in the middle of its prompt computes the beginning again: that is known.
    """
    request.prompt_logprobs += found[len(request.prompt_logprobs) - start :]


def _answered(request: Request) -> Delta:
    """What a request that pools came to."""
    assert request.pooling is not None
    assert request.pooled is not None
    return delta(request, ())._replace(vector=request.pooling.answer(request.pooled, request.num_prompt))


def _special(outcome: Outcome) -> set[int]:
    """Rows of which there is more to tell than their tokens."""
    found = {*outcome.errors, *outcome.proposals, *outcome.logprobs, *outcome.prompt_logprobs, *outcome.pooled}
    if drafts := outcome.plan.drafts:
        found.update(row for row, request in enumerate(outcome.plan.requests) if request in drafts)
    return found


_new = tuple.__new__  # a NamedTuple made without the cost of its keyword constructor


class ResultApplier:
    """Applies outcomes row by row. Rows whose request was preempted or ended meanwhile are told by their epoch.

    Args:
        overlap: plans are made before the outcome of the one before is known; ``Request.pending`` is kept.
    """

    def __init__(self, limits: Limits, kv: KVCache, counters: Counters, *, overlap: bool = False) -> None:
        self._kv = kv
        self._counters = counters
        self._vocab = limits.vocab_size
        self._page_size = limits.page_size
        self._overlap = overlap
        self._publishes = overlap or kv.publish_when != "planned"

    def apply(self, outcome: Outcome, outbox: list[Delta]) -> None:
        """Advance the plan's requests, append tokens, mark ends; news go into ``outbox``. Mutates.

        Fills ``outcome.finished`` and ``outcome.dropped``.
        """
        plan, special = outcome.plan, _special(outcome)
        vocab, size, overlap, publishes = self._vocab, self._page_size, self._overlap, self._publishes
        when = self._kv.publish_when
        early, prefilled = when == "planned", when == "prefilled"
        finished: list[Request] = []
        dropped: list[int] = []
        computed = output = 0
        rows = zip(plan.requests, plan.epochs, plan.counts, outcome.tokens, strict=True)
        for row, (request, epoch, count, tokens) in enumerate(rows):
            if (
                request.epoch != epoch
                or len(tokens) != 1
                or not 0 <= (token := tokens[0]) < vocab
                or token in request.stop_ids
                or (num_tokens := len(known := request.tokens) + 1) >= request.max_total
                or (special and row in special)
            ):
                if not self._row(outcome, row, outbox):
                    dropped.append(row)
                elif request.finish is not None:
                    finished.append(request)
                continue
            # The steady state: one token that ends nothing.
            if overlap:
                request.pending -= 1
            request.computed = done = request.computed + count
            known.append(token)
            computed += count
            output += 1
            if publishes and (
                done - count < request.prefill_target
                if prefilled
                else (request.planned - request.pending if early else done) % size < count
            ):
                self._publish(request)
            first = request.num_prompt
            num_output = num_tokens - first
            if num_output == 1 and request.prompt_logprobs:
                outbox.append(delta(request, tokens))
                continue
            news = (request.id, tuple(tokens), None, None, request.cached_tokens, first, num_output, (), (), b"")
            outbox.append(_new(Delta, news))
        self._counters.computed_tokens += computed
        self._counters.output_tokens += output
        self._counters.late_results += len(dropped)
        outcome.finished = tuple(finished)
        outcome.dropped = tuple(dropped)

    def _row(self, outcome: Outcome, row: int, outbox: list[Delta]) -> bool:
        """Apply one row, whatever came of it; False where it comes too late. Mutates."""
        plan, counters = outcome.plan, self._counters
        request, count, tokens = plan.requests[row], plan.counts[row], outcome.tokens[row]
        late = request.epoch != plan.epochs[row]
        if late and not self._late(request, plan.epochs[row], tokens):
            return False
        if not late and row in outcome.errors:  # what it computed is worth nothing: no progress, nothing is published
            request.planned -= count
            finish(request, Finish.ERROR, outcome.errors[row], counters)
            outbox.append(delta(request, ()))
            return True
        if not late:
            if self._overlap and tokens:
                request.pending -= 1
            if request in plan.drafts:
                count -= self._reject(request, len(plan.drafts[request]), len(tokens))
            counters.computed_tokens += count
            request.computed += count
        if row in outcome.prompt_logprobs:
            _remember(request, plan.starts[row], outcome.prompt_logprobs[row])
        if row in outcome.pooled and _pool(request, outcome.pooled[row]):
            finish(request, Finish.STOP, None, counters)
            outbox.append(_answered(request))
            return True
        if tokens:
            tokens = self._append(request, tokens)
            counters.output_tokens += len(tokens)
        if self._completes(request, count, sampled=bool(outcome.tokens[row])):
            self._publish(request)
        if not outcome.tokens[row]:
            return True
        if request.finish is None and not self._overlap and (proposed := outcome.proposals.get(row)):
            request.drafts = proposed
            request.quiet = 0
        outbox.append(delta(request, tokens, outcome.logprobs.get(row, ())))
        return True

    def _completes(self, request: Request, count: int, *, sampled: bool) -> bool:
        """Whether so many tokens more may have completed something to publish: a page or, ``prefilled``, a prompt."""
        when = self._kv.publish_when
        if not self._publishes:
            return False
        if when == "prefilled":
            return sampled and request.computed - count < request.prefill_target
        done = request.planned - request.pending if sampled and when == "planned" else request.computed
        return done % self._page_size < count

    @staticmethod
    def _late(request: Request, epoch: int, tokens: Sequence[int]) -> bool:
        """Whether the tokens of a row whose request gave up its pages since still count: it waits, they are its next.

        The step was planned before the one that preempted the request, so it computed them from good KV.
        """
        return bool(tokens) and request.state is State.WAITING and request.epoch == epoch + 1

    def _reject(self, request: Request, drafts: int, tokens: int) -> int:
        """Take back the progress of drafts that were not accepted: their KV does not count. Returns how many."""
        rejected = drafts + 1 - tokens
        self._counters.drafted_tokens += drafts
        self._counters.accepted_tokens += tokens - 1
        request.planned -= rejected
        if self._overlap:
            request.pending -= drafts
        request.lagging = not self._publishes
        request.quiet = 0
        return rejected

    def _append(self, request: Request, tokens: Sequence[int]) -> Sequence[int]:
        """Append sampled tokens until one ends the request; returns those that count."""
        known = request.tokens
        for number, token in enumerate(tokens, 1):
            if not 0 <= token < self._vocab:
                what = f"the executor sampled token {token} outside the vocabulary"
                finish(request, Finish.ERROR, what, self._counters)
                return tokens[: number - 1]
            known.append(token)
            if token in request.stop_ids and request.num_output >= request.params.min_tokens:
                finish(request, Finish.STOP, str(token), self._counters)
            elif len(known) >= request.max_total:
                self._end_by_length(request)
            else:
                continue
            return tokens[:number]
        return tokens

    def _end_by_length(self, request: Request) -> None:
        """The request may not grow: its own limit, the model's, or the pool does not hold its next token's KV."""
        finish(request, Finish.LENGTH, "kv_capacity" if request.capped else None, self._counters)

    def _publish(self, request: Request) -> None:
        """Publish committed tokens, where a page was completed; for ``prefilled`` caches, where a prefill was.

        What a request that ends has beyond that is kept, or not, when it lets go of its pages.
        """
        when, upto = self._kv.publish_when, request.computed
        if when == "planned":  # overlap mode: pages whose last token was not known when it was planned
            upto = min(request.planned - request.pending, len(request.tokens) - 1)  # drafts may outrun the end
        elif request.state is not State.RUNNING or (when == "prefilled" and upto < request.prefill_target):
            return
        if not request.write_cache:
            return
        pages = self._kv.publish(request, upto).pages
        if pages is not None:
            request.pages = pages
            request.quiet = 0
