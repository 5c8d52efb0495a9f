"""Where workloads come from, written as text: ``poisson:rate=8,requests=1000,prompt=lognormal:512:1``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.core.errors import ConfigError
from engine.lab.arrivals import Workload


class Source(BaseModel, ABC):
    """A way to make a workload; its fields are what can be set. The same fields and seed make the same workload.

    Class attributes:
        name: how it is chosen.
        bare: the field that may be written without its name, first; empty: none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str] = ""
    bare: ClassVar[str] = ""

    @abstractmethod
    def make(self, seed: int = 0) -> Workload:
        """The workload. Raises ``ConfigError`` where its fields, or the file that it reads, make no sense."""

    def spelled(self) -> str:
        """As text that makes the same."""
        given = [f"{key}={getattr(self, key)}" for key in sorted(self.model_fields_set)]
        return f"{self.name}:{','.join(given)}" if given else self.name


def sources() -> dict[str, type[Source]]:
    """All there are, by name."""
    from engine.lab import conversations, logs, synthetic, traces

    kinds: list[type[Source]] = [*synthetic.KINDS, *conversations.KINDS, *traces.KINDS, logs.Log]
    return {kind.name: kind for kind in kinds}


def source(text: str) -> Source:
    """``NAME``, or ``NAME:key=value,key=value``. Raises ``ConfigError``, with what is near to what is unknown."""
    name, _, rest = text.partition(":")
    known = sources()
    kind = known.get(name)
    if kind is None:
        raise ConfigError(f"workload {text!r}: there is no source {name!r}: {_near(name, known)}")
    given: dict[str, Any] = {}
    for number, part in enumerate(part for part in rest.split(",") if part):
        key, equals, value = part.partition("=")
        if not equals and not number and kind.bare:
            key, value = kind.bare, part
        elif not equals:
            raise ConfigError(f"workload {text!r}: {part!r} is no key=value")
        key = key.replace("-", "_")
        if key not in kind.model_fields:
            raise ConfigError(f"workload {text!r}: {name} has no {key!r}: {_near(key, kind.model_fields)}")
        given[key] = value
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        words = first["msg"].removeprefix("Value error, ")
        what = f"{key} is missing" if first["type"] == "missing" else f"{key}: {words}, got {first['input']!r}"
        raise ConfigError(f"workload {text!r}: {what}") from error


def workload(text: str, seed: int = 0) -> Workload:
    """The workload that the text describes. Raises ``ConfigError``."""
    return source(text).make(seed)


def _near(name: str, known: Any) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
