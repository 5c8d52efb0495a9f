"""What all stores share: keys in, pages out, and one thread that does it so that the engine never waits.

A store keeps pages by key, one blob a page. Loads go before saves, since somebody waits for them. Whatever a store
raises is a failed transfer with the reason; pages are filled in order, and what follows the first bad one is given up.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.memory import Bytes, KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector, PluginOptions

log = logging.getLogger(__name__)

GOODBYE = 5.0  # seconds that a page under way has before its thread is given up


class StoreOptions(PluginOptions):
    """Options of every store."""

    min_tokens: int = Field(0, ge=0, description="load only where it gives so many tokens more than are cached")
    patience: float = Field(5.0, gt=0, description="seconds that a request may be kept waiting for a load")


class StoreConnector(Connector, ABC):
    """A tier of pages by key. Subclasses keep them; ``has`` is called on the engine's thread, the rest on the store's.

    Attributes: ``hits`` and ``kept``, pages given and taken; ``errors``, pages that could not be read or written.
    """

    loads = True
    saves = True
    Options = StoreOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.min_tokens = self.options.min_tokens
        self.patience = self.options.patience
        self.hits = self.kept = self.errors = 0
        self._pulls: deque[Transfer] = deque()
        self._pushes: deque[Transfer] = deque()
        self._cancelled: set[str] = set()
        self._events: deque[TransferEvent] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._layout = KVLayout((), "")

    # ---- to implement

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Whether the page is there. At once, from any thread. Being wrong costs time only."""

    @abstractmethod
    def get(self, key: bytes) -> Bytes | None:
        """The page's bytes, ``[page_bytes]``; ``None`` where it is not there (any more). Raises what it likes."""

    @abstractmethod
    def put(self, key: bytes, content: Bytes) -> None:
        """Keep a page that ``has`` does not know; the array is the store's. Raises what it likes."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """These are asked for, or offered again: the last to be evicted. Nothing by default."""

    def open(self, layout: KVLayout) -> None:
        """Make ready for pages of this layout. Raises ``ConfigError``."""

    # ---- the connector

    def register(self, layout: KVLayout) -> None:
        """Open the store and start its thread."""
        self._layout = layout
        self.open(layout)
        self._thread = threading.Thread(target=self._serve, name=f"engine-{self.name}", daemon=True)
        self._thread.start()

    @hookimpl
    def transfer_kv(self, transfers: Sequence[Transfer]) -> Sequence[TransferEvent]:
        """Look-ups are answered at once; loads and saves when they are done."""
        found = []
        work = False
        for wish in transfers:
            if wish.kind == "probe":
                found.append(self._look_up(wish))
            elif wish.kind == "cancel":
                self._cancelled.add(wish.of)
            else:
                (self._pulls if wish.kind == "pull" else self._pushes).append(wish)
                work = True
        if work:
            with self._wake:
                self._wake.notify()
        while self._events:
            found.append(self._events.popleft())
        return found

    def close(self) -> None:
        """Stop the thread; what was not done yet never is."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(GOODBYE)

    # ---- inside

    def _look_up(self, wish: Transfer) -> TransferEvent:
        count = 0
        for key in wish.keys:
            if not self.has(key):
                break
            count += 1
        self.touch(wish.keys[:count])
        return TransferEvent(wish.id, "found", tokens=count * self._page_size)

    def start(self, context: Any) -> None:
        """Nothing is opened before ``register``."""
        self._page_size = context.limits.page_size

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._pulls or self._pushes):
                    self._wake.wait()
                if self._closing:
                    return
            wish = (self._pulls or self._pushes).popleft()
            if len(wish.keys) != len(wish.pages):
                reason = f"{len(wish.keys)} keys for {len(wish.pages)} pages"
                self._events.append(TransferEvent(wish.id, "failed", reason=reason))
            else:
                self._events.append(self._load(wish) if wish.kind == "pull" else self._save(wish))

    def _load(self, wish: Transfer) -> TransferEvent:
        for at, (key, page) in enumerate(zip(wish.keys, wish.pages, strict=True)):
            reason = "cancelled" if wish.id in self._cancelled or self._closing else self._fill(key, page)
            if reason:
                self._cancelled.discard(wish.id)
                return TransferEvent(wish.id, "failed", failed_pages=wish.pages[at:], reason=reason)
        self._cancelled.discard(wish.id)
        return TransferEvent(wish.id, "done")

    def _fill(self, key: bytes, page: int) -> str:
        """Fill one page; what went wrong, in words, or nothing."""
        try:
            content = self.get(key)
            if content is None:
                return "it is not there any more"
            self._layout.write(page, content)
        except Exception as error:
            self.errors += 1
            return f"{type(error).__name__}: {error}"
        self.hits += 1
        return ""

    def _save(self, wish: Transfer) -> TransferEvent:
        self.touch(wish.keys)
        for key, page in zip(wish.keys, wish.pages, strict=True):
            if self._closing:
                return TransferEvent(wish.id, "failed", reason="the store is being closed")
            try:
                if not self.has(key):
                    self.put(key, self._layout.read(page))
                    self.kept += 1
            except Exception as error:
                self.errors += 1
                return TransferEvent(wish.id, "failed", reason=f"{type(error).__name__}: {error}")
        return TransferEvent(wish.id, "done")
