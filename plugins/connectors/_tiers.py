"""One tier of several: a store that is asked for what it has, and whose failures are nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.core.memory import Bytes
from engine.core.pace import Line
from engine.plugins.connectors._health import Unreachable
from engine.plugins.connectors._store import StoreConnector

T = TypeVar("T")


class Tier:
    """A store with a name, and what loading from it takes. Never raises for what the store does.

    Attribute ``pace``: seconds by pages, of what was loaded from it.
    """

    def __init__(self, store: StoreConnector, name: str) -> None:
        self.store, self.name = store, name
        self.pace = Line()

    @property
    def ready(self) -> bool:
        """Whether it may be asked now."""
        return self.store.health.good

    def has_many(self, keys: Sequence[bytes]) -> int:
        """As the store's; 0 where that fails."""
        if not self.ready:
            return 0
        try:
            return self._worked(self.store.has_many(keys))
        except Exception as error:
            self._lost(error)
            return 0

    def has(self, key: bytes) -> bool:
        """Whether the page is there, of a tier that can say so at once."""
        return not self.store.remote and self.store.has_many([key]) > 0

    def get_many(self, keys: Sequence[bytes]) -> list[Bytes]:
        """The first pages that are there and right."""
        good: list[Bytes] = []
        if not self.ready:
            return good
        began = time.monotonic()
        try:
            for content in self._worked(self.store.get_many(keys)):
                if content is None:
                    break
                if isinstance(content, Exception):
                    self.store.failed(content)
                    break
                good.append(content)
        except Exception as error:
            self._lost(error)
            return []
        if good:
            self.pace.add(len(good), time.monotonic() - began)
            self.store.hits += len(good)
        return good

    def keep(self, keys: Sequence[bytes], read: Callable[[int], Bytes]) -> tuple[int, str]:
        """Keep what is lacking; how many pages, and what went wrong, in words. Raises what ``read`` raises."""
        if not self.ready:
            return 0, f"{self.name}: left alone after {self.store.health.cause}"
        try:
            places = self.store.lacking(keys)
        except Exception as error:
            return 0, self._lost(error)
        if not places:
            return 0, ""
        contents = [read(at) for at in places]
        try:
            self.store.put_many([keys[at] for at in places], contents)
        except Exception as error:
            self.store.failed(error)
            return 0, f"{self.name}: {type(error).__name__}: {error}"
        self.store.kept += len(places)
        self._worked(None)
        return len(places), ""

    def stats(self) -> dict[str, int | float]:
        """The store's own numbers and what loading takes, with the tier's name."""
        latency, slope = self.pace.fitted()
        numbers = {**self.store.stats(), "load_latency_seconds": latency, "load_seconds_per_page": slope}
        return {f"{self.name}_{name}": value for name, value in numbers.items()}

    def _lost(self, error: Exception) -> str:
        words = f"{type(error).__name__}: {error}"
        self.store.failed(error if isinstance(error, Unreachable) else Unreachable(words))
        return f"{self.name}: {words}"

    def _worked(self, answer: T) -> T:
        if self.store.remote:
            self.store.health.worked()
        return answer
