"""Applying a plan's outcome to its requests: progress, tokens, and who ends."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.plan import Delta, Outcome
from engine.core.protocols import KVCache, Limits
from engine.core.request import Finish, Request, State
from engine.core.stats import Counters


def finish(request: Request, reason: Finish, detail: str | None, counters: Counters) -> None:
    """Mark a request as ended. What it holds is returned by the core, after everybody was told. Mutates."""
    request.state = State.FINISHED
    request.finish = reason
    request.detail = detail
    counters.ended(reason)


def delta(request: Request, tokens: Sequence[int]) -> Delta:
    """What is new of a request."""
    num_prompt = request.num_prompt
    output = len(request.tokens) - num_prompt
    return Delta(request.id, tuple(tokens), request.finish, request.detail, request.cached_tokens, num_prompt, output)


class ResultApplier:
    """Applies outcomes row by row. Rows whose request was preempted or ended meanwhile are dropped by epoch."""

    def __init__(self, limits: Limits, kv: KVCache, counters: Counters) -> None:
        self._kv = kv
        self._counters = counters
        self._vocab = limits.vocab_size
        self._pool_tokens = limits.pool_tokens
        self._page_size = limits.page_size
        self._publishes = kv.publish_when != "planned"

    def apply(self, outcome: Outcome, outbox: list[Delta]) -> None:
        """Advance the plan's requests, append tokens, mark ends; news go into ``outbox``. Mutates.

        Fills ``outcome.finished`` and ``outcome.dropped``.
        """
        plan, errors = outcome.plan, outcome.errors
        drafts, proposals = plan.drafts, outcome.proposals
        vocab, pool_tokens, publishes = self._vocab, self._pool_tokens, self._publishes
        finished: list[Request] = []
        dropped: list[int] = []
        computed = output = 0
        rows = zip(plan.requests, plan.epochs, plan.counts, outcome.tokens, strict=True)
        for row, (request, epoch, count, tokens) in enumerate(rows):
            if request.epoch != epoch:
                dropped.append(row)
                continue
            request.in_flight -= count
            if errors and row in errors:  # what it computed is worth nothing: no progress, nothing is published
                finish(request, Finish.ERROR, errors[row], self._counters)
                finished.append(request)
                outbox.append(delta(request, ()))
                continue
            if drafts and request in drafts:
                count -= len(drafts[request]) - (len(tokens) - 1)  # rejected drafts have no KV that counts
                request.lagging = True
            computed += count
            request.computed += count
            if not tokens:
                if publishes:
                    self._publish(request, count)
                continue
            if len(tokens) == 1 and 0 <= (token := tokens[0]) < vocab and token not in request.stop_ids:
                # The steady state: one token that can only end the request by its length.
                known = request.tokens
                known.append(token)
                output += 1
                if len(known) >= request.max_total or len(known) > pool_tokens:
                    self._end_by_length(request)
            else:
                tokens = self._append(request, tokens)
                output += len(tokens)
            if request.finish is not None:  # its release publishes what it leaves behind
                finished.append(request)
            else:
                if publishes:
                    self._publish(request, count)
                if proposals:
                    request.drafts = proposals.get(row, ())
            outbox.append(delta(request, tokens))
        self._counters.computed_tokens += computed
        self._counters.output_tokens += output
        self._counters.late_results += len(dropped)
        outcome.finished = tuple(finished)
        outcome.dropped = tuple(dropped)

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
            elif len(known) >= request.max_total or len(known) > self._pool_tokens:
                self._end_by_length(request)
            else:
                continue
            return tokens[:number]
        return tokens

    def _end_by_length(self, request: Request) -> None:
        """The request may not grow: its own limit, or the whole pool does not hold its next token's KV."""
        detail = None if request.num_tokens >= request.max_total else "kv_capacity"
        finish(request, Finish.LENGTH, detail, self._counters)

    def _publish(self, request: Request, count: int) -> None:
        """Publish committed tokens where a page was completed; for ``prefilled`` caches, where a prefill was."""
        upto = request.computed
        if self._kv.publish_when == "prefilled":
            if not upto - count < request.prefill_target <= upto:
                return
        elif upto // self._page_size == (upto - count) // self._page_size:
            return
        pages = self._kv.publish(request, upto).pages
        if pages is not None:
            request.pages = pages
