"""The suite of executors finds log-probabilities that do not belong to the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from engine.core import Outcome, Plan, TokenLogprobs
from engine.plugins.executors.sim import SimExecutor
from engine.testing import ExecutorSuite, Violation


class OneTooLate(SimExecutor):
    """Reports of the prompt the tokens themselves instead of those that follow."""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        shifted = {
            row: [
                structs.replace(one, token=plan.requests[row].tokens[plan.starts[row] + n])
                for n, one in enumerate(found)
            ]
            for row, found in outcome.prompt_logprobs.items()
        }
        return replace(outcome, prompt_logprobs=shifted)


class OfWhat(SimExecutor):
    """Each token's log-probability depends on the chunk that it is computed in; or rivals are in no order."""

    how = ""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)

        def change(row: int, one: TokenLogprobs) -> TokenLogprobs:
            if self.how == "chunk":
                return structs.replace(one, logprob=-0.001 * plan.counts[row], rank=1, top_logprobs=(-1.0, -2.0))
            if self.how == "order":
                return structs.replace(one, top_logprobs=one.top_logprobs[::-1])
            return structs.replace(one, rank=one.rank + 1)

        def changed(found: Any) -> Any:
            return {row: [change(row, one) for one in some] for row, some in found.items()}

        return replace(outcome, logprobs=changed(outcome.logprobs), prompt_logprobs=changed(outcome.prompt_logprobs))


def suite(cls: type, how: str = "") -> ExecutorSuite:
    executor = type(cls.__name__, (cls,), {"how": how})
    return type("Tried", (ExecutorSuite,), {"plugin": executor})()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("cls", "how", "words"),
    [
        (OneTooLate, "", "log-probabilities of"),
        (OfWhat, "chunk", "in one piece"),
        (OfWhat, "order", "likeliest first"),
        (OfWhat, "rank", "rank is wrong"),
    ],
)
def test_wrong_log_probabilities_are_found(cls: type, how: str, words: str) -> None:
    with pytest.raises(Violation, match=words):
        suite(cls, how).test_log_probabilities_belong_to_the_tokens()


def test_right_ones_pass() -> None:
    suite(SimExecutor).test_log_probabilities_belong_to_the_tokens()


class Pools(SimExecutor):
    """Sums a mean over the wrong states: one more with each chunk, a part of the first row's of the batch; or says
    that the last state is the sum."""

    how = ""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        found = dict(outcome.pooled)
        for row in found:
            if self.how == "chunk":
                found[row] = found[row] + np.float32(1)
            elif self.how == "company":
                found[row] = found[row] + found[min(found)] / 8
            elif self.how == "position":
                found[row] = found[row] * np.float32(plan.counts[row])
        return replace(outcome, pooled=found)


@pytest.mark.parametrize("how", ["chunk", "company", "position"])
def test_wrong_vectors_are_found(how: str) -> None:
    with pytest.raises(Violation, match="together"):
        suite(Pools, how).test_vectors_do_not_depend_on_the_company()


def test_right_vectors_pass() -> None:
    suite(SimExecutor).test_vectors_do_not_depend_on_the_company()


class SaysWhatItLikes(SimExecutor):
    """Never asks the guide; or asks it of what was said before the last token; or of the committed tokens only."""

    how = ""

    def execute(self, plan: Plan) -> Outcome:
        guides = [request.guide for request in plan.requests]
        for request in plan.requests:
            request.guide = Deaf(request.guide, self.how) if request.guide and self.how else None
        try:
            return super().execute(plan)
        finally:
            for request, guide in zip(plan.requests, guides, strict=True):
                request.guide = guide


class Deaf:
    def __init__(self, guide: Any, how: str) -> None:
        self.guide, self.how = guide, how

    def allowed(self, tokens: Any, first: int, committed: int, pending: Any = ()) -> Any:
        if self.how == "late":
            return self.guide.allowed(tokens, first, max(first, committed - 1))
        return self.guide.allowed(tokens, first, committed)


@pytest.mark.parametrize("how", ["", "late", "committed"])
def test_executors_that_do_not_keep_to_a_grammar_are_found(how: str) -> None:
    with pytest.raises(Violation, match="what the grammar does not allow was said"):
        suite(SaysWhatItLikes, how).test_grammars_are_kept()


def test_those_that_keep_to_it_pass() -> None:
    suite(SimExecutor).test_grammars_are_kept()
