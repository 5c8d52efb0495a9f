"""Fitting a cost model to steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.core.errors import ConfigError
from engine.core.least_squares import Floats, nnls
from engine.lab.cost import FEATURES, Fitted
from engine.lab.work import StepWork

KNEES = (0, 4, 8, 16, 32, 64, 128, 256)  # tokens at which a device may turn from reading weights to computing
LEAST = 16  # steps
ROUNDS = 4


class Measured(NamedTuple):
    """A step and the seconds that it took."""

    work: StepWork
    seconds: float


class Errors(NamedTuple):
    """How far a cost model is off over steps, in parts: mean and 99th percentile of the size of the error, and of all
    steps together (above 0: it says too much)."""

    mean: float
    p99: float
    total: float

    def __str__(self) -> str:
        return f"off by {self.mean:.1%} a step in the mean, p99 {self.p99:.1%}, all steps together {self.total:+.1%}"


def fit(steps: Iterable[Measured], about: dict[str, Any] | None = None) -> Fitted:
    """Non-negative weights of the features, so that the sum of squared errors in parts of the step is least.

    In parts, so that short steps (decodes) count as much as long ones (prompts). Steps that took far more than others
    of their kind, three times the first fit and more, were somebody else's (a busy machine): they are left out.

    Raises:
        ConfigError: fewer than 16 steps that computed something.
    """
    known = [step for step in steps if step.work.tokens and step.seconds > 0]
    if len(known) < LEAST:
        raise ConfigError(f"a cost cannot be fitted to {len(known)} steps: at least {LEAST} are needed")
    first = _best(known)
    kept = [step for step in known if step.seconds < 3 * first.seconds(step.work)]
    best = _best(kept) if LEAST <= len(kept) < len(known) else first
    found = errors(best, known)
    return Fitted(
        best.weights, best.knee,
        {**(about or {}), "steps": len(known), "left_out": len(known) - len(kept),
         "error_mean": found.mean, "error_p99": found.p99, "error_total": found.total},
    )  # fmt: skip


def errors(cost: Any, steps: Sequence[Measured]) -> Errors:
    """How far a cost model is off on steps. Does not mutate."""
    said = np.array([cost.seconds(step.work) for step in steps])
    took = np.array([step.seconds for step in steps])
    off = np.abs(said - took) / took
    return Errors(float(off.mean()), float(np.percentile(off, 99)), float(said.sum() / took.sum() - 1))


def _best(steps: Sequence[Measured]) -> Fitted:
    """The best knee, and the weights for it.

    Errors are in parts of what the fit before said of the step, the first time of what it took: in parts of what they
    took, steps that chance made longer would count less than those that it made shorter.
    """
    seconds = np.array([step.seconds for step in steps])
    works = np.array([step.work for step in steps], np.float64)
    size, knee, weights = seconds, 0, np.zeros(len(FEATURES))
    for _ in range(ROUNDS):
        found: list[tuple[float, int, Floats]] = []
        for knee in KNEES:
            columns = _columns(works, knee) / size[:, None]
            weights = nnls(columns, seconds / size)
            found.append((float(((columns @ weights - seconds / size) ** 2).sum()), knee, weights))
        _, knee, weights = min(found, key=lambda one: one[0])
        size = np.maximum(_columns(works, knee) @ weights, 1e-9)
    return Fitted({name: float(value) for name, value in zip(FEATURES, weights, strict=True) if value > 0}, knee)


def _columns(works: Floats, knee: int) -> Floats:
    """``[steps, features]``."""
    tokens, prefill, decode, context, scores, samples = works.T
    ones = np.ones(len(works))
    return np.stack([ones, prefill, decode, context, scores, samples, np.maximum(0, tokens - knee)], axis=1)
