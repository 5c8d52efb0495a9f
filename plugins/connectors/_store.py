"""What all stores share: keys in, pages out, and threads that do it so that the engine never waits.

A store keeps pages by key, one blob a page. Whatever a store raises is a failed transfer with the reason, or a look-up
that found nothing; pages are filled in order, and what follows the first bad one is given up. What is evicted between
a look-up and its load is missing then: the load ends there, and the rest is computed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from engine.core.config import parse_bytes
from engine.core.errors import ConfigError
from engine.core.hookspecs import hookimpl
from engine.core.memory import Bytes, KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector, PluginOptions
from engine.plugins.connectors._health import Health, Unreachable
from engine.plugins.connectors._jobs import Job, Over, Workers

MOST_KEYS = 64  # pages a slice at most


class KeptInPart(OSError):
    """Pages are kept, but not everywhere where they should be: no reason to leave out those that are still to come.

    Args:
        kept: how many of them are new.
    """

    def __init__(self, words: str, kept: int) -> None:
        super().__init__(words)
        self.kept = kept


class StoreOptions(PluginOptions):
    """Options of every store."""

    min_tokens: int = Field(0, ge=0, description="load only where it gives so many tokens more than are cached")
    patience: float = Field(5.0, gt=0, description="seconds that a request may be kept waiting for a load")


class StoreConnector(Connector, ABC):
    """A tier of pages by key. Its methods that take keys are called on its own threads, unless said otherwise.

    Class attributes:
        remote: look-ups take time: ``has_many`` is called on a thread of the store's, and the answer comes later. Else
            the engine's thread calls it.
        threads: how many work at once.
        slice_bytes: bytes of the pages that are moved by one call; at least one page, at most 64.

    Attributes: ``hits`` and ``kept``, pages given and taken; ``errors``, pages that could not be read or written, and
    look-ups that failed; ``spill``, what is called with pages that are evicted, if anybody wants them.
    """

    loads = True
    saves = True
    remote: bool = False
    threads: int = 1
    slice_bytes: int = 1
    Options = StoreOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.min_tokens = self.options.min_tokens
        self.patience = self.options.patience
        self.hits = self.kept = self.errors = 0
        self.spill: Callable[[Sequence[bytes], Sequence[Bytes]], None] | None = None
        self.later: Callable[[Callable[[], bool]], None] = _now
        self.health = Health(self.name)
        self._counting = threading.Lock()
        self._workers: Workers | None = None
        self._layout = KVLayout((), "")
        self._slice = self._page_size = 1

    # ---- to implement

    @abstractmethod
    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, without a gap. Being wrong costs time only. Raises what it likes."""

    @abstractmethod
    def get_many(self, keys: Sequence[bytes]) -> Sequence[Bytes | Exception | None]:
        """The pages' bytes, ``[page_bytes]`` each; ``None`` where one is not there (any more), an exception where it
        cannot be used. What follows the first that is missing may be left out. Raises where nothing can be had at all.
        """

    @abstractmethod
    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """Keep pages; the arrays are the store's from now on. Mutates. Raises ``Unreachable`` or what it likes."""

    @abstractmethod
    def forget_all(self) -> int:
        """Forget all that is kept of this layout; how many pages. Mutates. On the engine's thread unless ``remote``."""

    def open(self, layout: KVLayout) -> None:
        """Make ready for pages of this layout. Raises ``ConfigError``."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """These are asked for, or offered again: the last to be evicted. Mutates. Nothing by default."""

    def lacking(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Places of the keys that are worth saving. Raises as ``has_many``."""
        if self.remote:
            return range(self.has_many(keys), len(keys))
        return [at for at, key in enumerate(keys) if not self.has_many([key])]

    def look(self, keys: Sequence[bytes]) -> tuple[int, tuple[tuple[int, float], ...]]:
        """How many of the first keys can be loaded, and (pages, seconds) of what that takes, where it is known."""
        return self.has_many(keys), ()

    def keep(self, keys: Sequence[bytes], read: Callable[[int], Bytes]) -> int:
        """Keep what is lacking; ``read(place)`` gives a page. Returns how many. Mutates.

        Raises as ``put_many``; ``KeptInPart`` where only some of the places that should have them have.
        """
        places = self.lacking(keys)
        if places:
            self.put_many([keys[at] for at in places], [read(at) for at in places])
        return len(places)

    def time_for(self, pages: int) -> float | None:
        """Seconds after which a load of so many pages ends with what has come; ``None``: when all has come."""
        return None

    # ---- the connector

    def start(self, context: Any) -> None:
        """Nothing is opened before ``register``."""
        self._page_size = context.limits.page_size

    def attach(self, layout: KVLayout) -> None:
        """Open it, without threads of its own. Raises ``ConfigError``."""
        self._layout = layout
        self._slice = min(MOST_KEYS, max(1, self.slice_bytes // max(1, layout.page_bytes)))
        self.open(layout)

    def register(self, layout: KVLayout) -> None:
        """Open the store and start its threads."""
        self.attach(layout)
        self._workers = Workers(self.name, self.threads, self._next_slice, self.patience)
        self.later = self._workers.later

    @hookimpl
    def transfer_kv(self, transfers: Sequence[Transfer]) -> Sequence[TransferEvent]:
        """Look-ups are answered at once if the store is no ``remote`` one; all else when it is done."""
        assert self._workers is not None
        found = []
        for wish in transfers:
            if wish.kind == "probe" and not self.remote:
                found.append(self._look_up(wish))
            elif wish.kind == "cancel":
                self._workers.cancel(wish.of)
            else:
                budget = self.time_for(len(wish.pages)) if wish.kind == "pull" else None
                self._workers.give(Job(wish, until=None if budget is None else time.monotonic() + budget))
        return [*found, *self._workers.take_events()]

    def clear(self) -> int:
        """Forget all that is kept; how many pages that is, or 0 where it takes its time. Mutates."""
        if not self.remote:
            return self.forget_all()

        def forget() -> bool:
            self.forget_all()
            return False

        self.later(forget)
        return 0

    def stats(self) -> dict[str, int | float]:
        """Pages given and taken, errors, and how often it was left alone for them."""
        numbers = {"hits": self.hits, "kept": self.kept, "errors": self.errors}
        return {**numbers, **({"outages": self.health.outages} if self.remote else {})}

    def close(self) -> None:
        """Stop the threads; what was not done yet never is."""
        if self._workers is not None:
            self._workers.close()

    # ---- for those who implement one

    def told(self, kind: Any, keys: Sequence[bytes]) -> None:
        """Tell whoever listens that these pages are kept (``stored``), or no longer (``removed``)."""
        if self.notice is not None and keys:
            self.notice(kind, keys)

    def failed(self, error: BaseException) -> None:
        """Count an error."""
        with self._counting:
            self.errors += 1
        if isinstance(error, Unreachable):
            self.health.failed(error)

    def count(self, *, hits: int = 0, kept: int = 0) -> None:
        """Count pages given and taken. Mutates; from any thread."""
        with self._counting:
            self.hits += hits
            self.kept += kept

    def lost(self, error: Exception) -> None:
        """A look-up failed: whatever it raised, the store as a whole cannot be used. Counts as an error."""
        self.failed(error if isinstance(error, Unreachable) else Unreachable(f"{type(error).__name__}: {error}"))

    def worked(self) -> None:
        """It answered."""
        if self.remote:
            self.health.worked()

    def room(self, page_bytes: int) -> int:
        """Pages that option ``capacity`` holds. Raises ``ConfigError`` where that is none."""
        pages = parse_bytes(self.options.capacity) // max(1, page_bytes)
        if not pages:
            raise ConfigError(
                f"connector {self.name}: capacity {self.options.capacity} does not hold one page of {page_bytes} bytes"
            )
        return pages

    # ---- inside

    def _look_up(self, wish: Transfer) -> TransferEvent:
        """What is there. A store that fails has nothing."""
        if not self.health.good:
            return TransferEvent(wish.id, "found")
        try:
            count, costs = self.look(wish.keys)
            self.touch(wish.keys[:count])
        except Exception as error:
            self.lost(error)
            return TransferEvent(wish.id, "found")
        self.worked()
        size = self._page_size
        costs = tuple((pages * size, seconds) for pages, seconds in costs)
        return TransferEvent(wish.id, "found", tokens=count * size, costs=costs)

    def _next_slice(self, job: Job) -> TransferEvent | None:
        wish = job.wish
        assert wish is not None
        if wish.kind == "probe":
            return self._look_up(wish)
        if len(wish.keys) != len(wish.pages):
            return TransferEvent(wish.id, "failed", reason=f"{len(wish.keys)} keys for {len(wish.pages)} pages")
        reason = self._moved(job, wish, wish.keys[job.at : job.at + self._slice])
        if reason:
            return TransferEvent(wish.id, "failed", failed_pages=wish.pages[job.at :], reason=reason)
        if job.at < len(wish.pages):
            return None
        return TransferEvent(wish.id, "failed" if job.wrong else "done", reason=job.wrong)

    def _moved(self, job: Job, wish: Transfer, keys: Sequence[bytes]) -> str:
        """Move the next slice; what went wrong, in words, or nothing."""
        if not self.health.good:
            return f"left alone after {self.health.cause}"
        try:
            reason = self._loaded(job, wish, keys) if wish.kind == "pull" else self._saved(job, wish, keys)
        except Over:
            raise
        except Exception as error:
            self.failed(error)
            return f"{type(error).__name__}: {error}"
        self.worked()
        return reason

    def _loaded(self, job: Job, wish: Transfer, keys: Sequence[bytes]) -> str:
        pages = self.get_many(keys)
        for content in pages:
            if content is None:
                break
            if isinstance(content, Exception):
                raise content
            with job.touching():
                self._layout.write(wish.pages[job.at], content)
                job.at += 1
            self.count(hits=1)
        else:
            if len(pages) >= len(keys):
                return ""
        return "it is not there any more"

    def _saved(self, job: Job, wish: Transfer, keys: Sequence[bytes]) -> str:
        def read(place: int) -> Bytes:
            with job.touching():
                return self._layout.read(wish.pages[job.at + place])

        if not job.at:
            self.touch(wish.keys)
        try:
            kept = self.keep(keys, read)
        except KeptInPart as error:
            self.failed(error)
            kept, job.wrong = error.kept, str(error)
        self.count(kept=kept)
        job.at += len(keys)
        return ""


def _now(task: Callable[[], bool]) -> None:
    """Of a store without threads."""
    while task():
        pass
