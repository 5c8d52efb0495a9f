"""A sim executor that fails in a chosen way when a prompt begins with a chosen token."""

from __future__ import annotations

import os
import time

from engine.core.plan import Outcome, Plan
from engine.core.protocols import ModelInfo
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
