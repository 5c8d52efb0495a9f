"""Sim executors that fail in a chosen way when a prompt begins with a chosen token, or say what they are told to."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from engine.core.plan import Outcome, Plan
from engine.core.protocols import ModelInfo
from engine.core.request import Request
from engine.core.sampling import TokenLogprobs
from engine.plugins.executors.sim import SimExecutor

RAISE, SLEEP, ROW_ERROR, ESCAPE, NONSENSE = 40_001, 40_002, 40_003, 40_004, 40_005


class Escape(BaseException):
    """Not an ``Exception``: nobody in the step may catch it."""


class SlowToLoad(SimExecutor):
    """Its model is loaded once a file is there: the one that the variable ``LOAD_WHEN`` names."""

    name = "slow-to-load"

    def load(self) -> ModelInfo:
        """Wait."""
        while not os.path.exists(os.environ["LOAD_WHEN"]):
            time.sleep(0.02)
        return super().load()


class EchoExecutor(SimExecutor):
    """Says the prompt again, over and over: what clients ask with is what they get, token by token.

    Beside its first token nothing is possible at all: log-probabilities of minus infinity.
    """

    name = "echo"

    @staticmethod
    def _sample(request: Request, last: int, length: int, vocab: int, twist: int) -> int:
        return request.tokens[(length - request.num_prompt) % request.num_prompt]

    def _made_up(self, plan: Plan, tokens: Sequence[Sequence[int]], asking: Sequence[int]) -> Any:
        return tuple(
            {row: [never(one, plan.requests[row].tokens[0]) for one in found] for row, found in made.items()}
            for made in super()._made_up(plan, tokens, asking)
        )


def never(one: TokenLogprobs, possible: int) -> TokenLogprobs:
    """The same, where all but one token is impossible."""
    top = tuple(0.0 if token == possible else -math.inf for token in one.top)
    return replace(one, logprob=0.0 if one.token == possible else -math.inf, top_logprobs=top)


class FaultyExecutor(SimExecutor):
    """Fails on demand."""

    name = "faulty"

    def execute(self, plan: Plan) -> Outcome:
        """Look for the tokens that ask for a fault; else compute like sim."""
        first = [request.tokens[0] for request in plan.requests]
        if RAISE in first:
            raise RuntimeError("the device fell off")
        if ESCAPE in first:
            raise Escape("something nobody expected")
        if SLEEP in first:
            time.sleep(3600)
        outcome = super().execute(plan)
        if NONSENSE in first:
            outcome.tokens = [(10**9,) for _ in plan.requests]
        outcome.errors = {row: "this row is bad" for row, token in enumerate(first) if token == ROW_ERROR}
        return outcome
