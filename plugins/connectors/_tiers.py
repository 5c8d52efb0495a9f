"""Tiers: stores one over the other, each asked for what it has; the failures of one are nobody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from engine.core.memory import Bytes
from engine.core.pace import Line
from engine.plugins.connectors._store import StoreConnector

TURNS = 8  # changes of tier within one prefix that are looked for; what is beyond is not found
UNDER_WAY = 128 * 2**20  # bytes that wait for being copied to another tier; what is beyond is not copied


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
            count = self.store.has_many(keys)
        except Exception as error:
            self.store.lost(error)
            return 0
        self.store.worked()
        return count

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
            pages = self.store.get_many(keys)
            self.store.worked()
            for content in pages:
                if content is None:
                    break
                if isinstance(content, Exception):
                    self.store.failed(content)
                    break
                good.append(content)
        except Exception as error:
            self.store.lost(error)
            return []
        if good:
            self.pace.add(len(good), time.monotonic() - began)
            self.store.count(hits=len(good))
        return good

    def keep(self, keys: Sequence[bytes], read: Callable[[int], Bytes]) -> tuple[int, str]:
        """Keep what is lacking; how many pages, and what went wrong, in words. Raises what ``read`` raises."""
        if not self.ready:
            return 0, f"{self.name}: left alone after {self.store.health.cause}"
        try:
            places = self.store.lacking(keys)
        except Exception as error:
            self.store.lost(error)
            return 0, self._words(error)
        if not places:
            return 0, ""
        contents = [read(at) for at in places]
        try:
            self.store.put_many([keys[at] for at in places], contents)
        except Exception as error:
            self.store.failed(error)
            return 0, self._words(error)
        self.store.count(kept=len(places))
        self.store.worked()
        return len(places), ""

    def stats(self) -> dict[str, int | float]:
        """The store's own numbers and what loading takes, with the tier's name."""
        latency, slope = self.pace.fitted()
        numbers = {**self.store.stats(), "load_latency_seconds": latency, "load_seconds_per_page": slope}
        return {f"{self.name}_{name}": value for name, value in numbers.items()}

    def _words(self, error: Exception) -> str:
        return f"{self.name}: {type(error).__name__}: {error}"


def where(tiers: Sequence[Tier], keys: Sequence[bytes]) -> list[tuple[Tier, int]]:
    """Which tier has how many of the keys, from the first key on without a gap; each the uppermost that has them."""
    runs: list[tuple[Tier, int]] = []
    at = 0
    while at < len(keys) and len(runs) < TURNS:
        for place, tier in enumerate(tiers):
            count = tier.has_many(keys[at : at + stretch(tiers[:place], keys[at:])])
            if count:
                runs.append((tier, count))
                at += count
                break
        else:
            break
    return runs


def stretch(above: Sequence[Tier], keys: Sequence[bytes]) -> int:
    """Pages after the first until one of the tiers above has one."""
    if not above:
        return len(keys)
    return next((at for at, key in enumerate(keys) if at and any(tier.has(key) for tier in above)), len(keys))


class Copies:
    """Pages on their way to another tier, done when nothing else is to be done: whoever loads does not wait for it.

    Attributes: ``made``, pages that were copied; ``left_out``, those that were not, since too much was under way.
    """

    def __init__(self, later: Callable[[Callable[[], bool]], None]) -> None:
        self._later = later
        self._lock = threading.Lock()
        self._bytes = self.made = self.left_out = 0

    def begin(self, tier: Tier, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Have them copied to this tier, as far as it lacks them."""
        size = sum(page.nbytes for page in pages)
        with self._lock:
            if self._bytes + size > UNDER_WAY:
                self.left_out += len(keys)
                return
            self._bytes += size

        def task() -> bool:
            count, _ = tier.keep(keys, pages.__getitem__)
            with self._lock:
                self._bytes -= size
                self.made += count
            return False

        self._later(task)
