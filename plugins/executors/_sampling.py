"""Choosing tokens from logits, a whole batch at a time. Who asks for nothing special costs one argmax.

Random numbers depend on nothing but a request's seed, its choice and the position of the token, so a seeded request
yields the same tokens alone, in any batch, in any order of steps, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.continuation import Row, certain
from engine.core.grammar import GrammarError
from engine.core.plan import Outcome, Plan
from engine.core.sampling import SamplingParams, TokenLogprobs
from engine.plugins.executors._sampling_draw import draw
from engine.plugins.executors._sampling_edits import NOTHING, Editor, Edits, apply
from engine.plugins.executors._sampling_logprobs import token_logprobs
from engine.plugins.executors._sampling_numbers import seed_of, uniform

Argmax = Callable[[Tensor], Tensor]
"""What finds the likeliest token of each row, as ``argmax`` does."""

INFINITY = float("inf")
NAN = "the model's logits are not numbers (NaN)"
NONE_LEFT = "every token is forbidden: by a grammar, logit_bias, stop tokens before min_tokens, or the model itself"


class Draw(NamedTuple):
    """One row to sample: parameters, the seed of its request, the position of the token, what changes its logits."""

    params: SamplingParams
    seed: int = 0
    position: int = 0
    edits: Edits = NOTHING


class Sampled(NamedTuple):
    """A token for each row; what is wrong with rows whose token means nothing; log-probabilities of those that ask."""

    tokens: list[int]
    bad: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


class Wanted(NamedTuple):
    """Which logits a plan needs.

    Attributes:
        keep: indices into the flattened batch: of the rows that sample, then of the prompts' tokens.
        rows: the plan's rows that sample.
        prompts: row -> the prompt tokens that follow those whose logits are kept for it.
    """

    keep: list[int]
    rows: list[int]
    prompts: dict[int, list[int]]


class Sampler:
    """Chooses the tokens of plans. ``seed`` is that of requests which bring none. Not thread-safe.

    Attribute ``argmax``: what finds the likeliest token of each row.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._editor = Editor()
        self.argmax: Argmax = argmax

    def wanted(self, plan: Plan, rows: Sequence[Row]) -> Wanted:
        """Which logits to compute. Does not mutate."""
        keep: list[int] = []
        sampling: list[int] = []
        prompts: dict[int, list[int]] = {}
        scored: list[int] = []
        end = 0
        for row, (request, count, samples) in enumerate(zip(plan.requests, plan.counts, plan.samples, strict=True)):
            if samples:
                sampling.append(row)
                keep.append(end + count - 1)
            if request.params.prompt_logprobs is not None:
                start = rows[row].start
                following = request.tokens[start + 1 : min(start + count + 1, request.num_prompt)]
                if following:
                    prompts[row] = following
                    scored += range(end, end + len(following))
            end += count
        return Wanted(keep + scored, sampling, prompts)

    def choose(self, logits: Tensor, plan: Plan, rows: Sequence[Row], wanted: Wanted) -> Outcome:
        """The plan's outcome, from ``logits [kept, vocab]`` as ``wanted`` has asked for them. Mutates them."""
        count = len(wanted.rows)
        prompt_logprobs, errors = self._prompts(logits[count:], plan, wanted)
        tokens: list[tuple[int, ...]] = [()] * len(plan.requests)
        logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        if count:
            draws, lost = self._draws(plan, rows, wanted)
            sampled = sample(logits[:count], draws, self.argmax)
            errors |= {wanted.rows[number]: words for number, words in sampled.bad.items()} | lost
            for number, (row, token) in enumerate(zip(wanted.rows, sampled.tokens, strict=True)):
                if row not in errors:
                    tokens[row] = (token,)
                    if number in sampled.logprobs:
                        logprobs[row] = (sampled.logprobs[number],)
        return Outcome(plan, tuple(tokens), errors, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def number(self, plan: Plan, row: int, known: Row) -> float:
        """What a row that draws is drawn by, in [0, 1). Does not mutate."""
        request = plan.requests[row]
        return uniform(seed_of(request, self._seed), request.params.choice, known.start + len(known.tokens))

    def _draws(self, plan: Plan, rows: Sequence[Row], wanted: Wanted) -> tuple[list[Draw], dict[int, str]]:
        """One for each row that samples; and what is wrong with rows whose grammar cannot be followed."""
        draws: list[Draw] = []
        lost: dict[int, str] = {}
        for row in wanted.rows:
            try:
                draws.append(self._draw(plan, row, rows[row]))
            except GrammarError as error:
                lost[row] = str(error)
                draws.append(Draw(plan.requests[row].params))
        return draws, lost

    def _draw(self, plan: Plan, row: int, known: Row) -> Draw:
        request = plan.requests[row]
        params = request.params
        position = known.start + len(known.tokens)
        seed = 0 if params.greedy else seed_of(request, self._seed)
        if not (params.min_tokens or params.penalised or params.logit_bias or request.guide):
            return Draw(params, seed, position)
        committed, pending = certain(plan, row, known)
        return Draw(params, seed, position, self._editor.edits(request, position, committed, pending))

    def _prompts(
        self, logits: Tensor, plan: Plan, wanted: Wanted
    ) -> tuple[dict[int, Sequence[TokenLogprobs]], dict[int, str]]:
        found: dict[int, Sequence[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        at = 0
        for row, following in wanted.prompts.items():
            most = plan.requests[row].params.prompt_logprobs
            assert most is not None
            mine = token_logprobs(logits[at : at + len(following)], following, [most] * len(following))
            at += len(following)
            if any(one.logprob != one.logprob for one in mine):
                errors[row] = NAN
            else:
                found[row] = mine
        return found, errors


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, the first of equals; a NaN where there is one. numpy's is ten times faster."""
    return torch.from_numpy(logits.numpy().argmax(axis=-1)) if logits.device.type == "cpu" else logits.argmax(dim=-1)


def sample(logits: Tensor, draws: Sequence[Draw], argmax: Argmax = argmax) -> Sampled:
    """Choose a token for each row of ``logits [rows, vocab]``. Mutates the rows that biases or penalties change.

    Rows that are greedy cost one argmax whatever the others want.
    """
    logits = logits.float().contiguous()
    reported = [row for row, each in enumerate(draws) if each.params.logprobs is not None]
    edited = any(each.edits is not NOTHING for each in draws)
    raw = logits[reported] if edited and reported else None  # a copy, before anything is changed
    if edited:
        apply(logits, [each.edits for each in draws], [each.params for each in draws])
    likeliest = argmax(logits)
    best = logits.gather(1, likeliest[:, None])[:, 0].tolist()
    bad = {row: NAN if value != value else NONE_LEFT for row, value in enumerate(best) if not value > -INFINITY}
    tokens: list[int] = likeliest.tolist()
    drawn = [row for row, each in enumerate(draws) if not each.params.greedy and row not in bad]
    if drawn:
        wishes = [draws[row] for row in drawn]
        numbers = [uniform(wish.seed, wish.params.choice, wish.position) for wish in wishes]
        picked = draw(logits, drawn, [wish.params for wish in wishes], numbers)
        for row, token in zip(drawn, picked, strict=True):
            tokens[row] = token
    if not reported:
        return Sampled(tokens, bad, {})
    if raw is None:
        raw = logits[reported] if len(reported) < len(draws) else logits
    counts = [draws[row].params.logprobs or 0 for row in reported]
    found = token_logprobs(raw, [tokens[row] for row in reported], counts)
    return Sampled(tokens, bad, {row: one for row, one in zip(reported, found, strict=True) if row not in bad})
