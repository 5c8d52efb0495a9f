"""How long prompts, answers and pauses are: distributions, written as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from engine.core.errors import ConfigError

Draw = Callable[[Random], float]

KINDS = "512, 100-900, exp:512, lognormal:512:1, pareto:512:1.5, each but the first two with :most behind it"


def distribution(text: str, what: str = "length") -> Draw:
    """A function that draws numbers; all have the mean that is written first.

    * ``512``: always this.
    * ``100-900``: whole numbers from the one to the other, all alike.
    * ``exp:MEAN``: exponential.
    * ``lognormal:MEAN:SIGMA``: SIGMA is the standard deviation of the logarithm; 1 is what chat prompts look like.
    * ``pareto:MEAN:ALPHA``: a long tail; ALPHA above 1, the smaller the longer.

    A number more, ``:MOST``, bounds what is drawn.

    Raises:
        ConfigError: the text is none of these.
    """
    kind, *numbers = text.strip().split(":")
    try:
        if not numbers:
            return _plain(kind)
        values = [float(number) for number in numbers]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError
        wanted = {"exp": 1, "lognormal": 2, "pareto": 2}[kind]
        most = values[wanted] if len(values) == wanted + 1 else math.inf
        if len(values) not in (wanted, wanted + 1):
            raise ValueError
        draw = _tailed(kind, *values[:wanted])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{what} {text!r} is none of {KINDS}") from error
    return lambda rng: min(most, draw(rng))


def _plain(text: str) -> Draw:
    low, dash, high = text.partition("-")
    if not dash:
        value = float(low)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError
        return lambda rng: value
    least, most = int(low), int(high)
    if not 0 <= least <= most:
        raise ValueError
    return lambda rng: rng.randint(least, most)


def _tailed(kind: str, mean: float, shape: float = 0.0) -> Draw:
    if kind == "exp":
        return lambda rng: rng.expovariate(1 / mean)
    if kind == "lognormal":
        middle = math.log(mean) - shape * shape / 2
        return lambda rng: rng.lognormvariate(middle, shape)
    if shape <= 1:
        raise ValueError
    least = mean * (shape - 1) / shape
    return lambda rng: least * rng.paretovariate(shape)


def whole(draw: Draw, rng: Random, least: int = 1) -> int:
    """A number of tokens."""
    return max(least, round(draw(rng)))
