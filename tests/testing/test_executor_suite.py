"""The suite of executors finds log-probabilities that do not belong to the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.core import Outcome, Plan, TokenLogprobs
from engine.plugins.executors.sim import SimExecutor
from engine.testing import ExecutorSuite, Violation


class OneTooLate(SimExecutor):
    """Reports of the prompt the tokens themselves instead of those that follow."""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        shifted = {
            row: [one._replace(token=plan.requests[row].tokens[plan.starts[row] + n]) for n, one in enumerate(found)]
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
                return one._replace(logprob=-0.001 * plan.counts[row], rank=1, top_logprobs=(-1.0, -2.0))
            if self.how == "order":
                return one._replace(top_logprobs=one.top_logprobs[::-1])
            return one._replace(rank=one.rank + 1)

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
