"""``host``: pages in this process's memory, beyond the KV pool. What the pool evicts is found here again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from engine.core.config import Size
from engine.core.identity import first_known
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._store import StoreConnector, StoreOptions


class HostStore(StoreConnector):
    """A tier in host memory, least recently used pages go first. Source: the host tier of SGLang's HiCache."""

    name = "host"

    class Options(StoreOptions):
        capacity: Size = Field("1GiB", description="memory for pages, e.g. 512MiB")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._pages: OrderedDict[bytes, Bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._most = 0

    def open(self, layout: KVLayout) -> None:
        """Raises ``ConfigError`` where not even one page fits."""
        self._most = self.room(layout.page_bytes)

    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first are in memory."""
        return first_known(keys, self._pages)

    def get_many(self, keys: Sequence[bytes]) -> Sequence[Bytes | None]:
        """The pages themselves: nobody writes to them."""
        return [self._pages.get(key) for key in keys]

    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """Keep pages, for others if need be."""
        gone: list[tuple[bytes, Bytes]] = []
        with self._lock:
            for key, content in zip(keys, contents, strict=True):
                self._pages[key] = content
            while len(self._pages) > self._most:
                gone.append(self._pages.popitem(last=False))
            self.told("stored", keys)
            self.told("removed", [key for key, _ in gone])
        if gone and self.spill is not None:
            self.spill([key for key, _ in gone], [content for _, content in gone])

    def touch(self, keys: Sequence[bytes]) -> None:
        """The last page of a prefix is the first to go: without those before it, it is worth nothing."""
        with self._lock:
            for key in reversed(keys):
                if key in self._pages:
                    self._pages.move_to_end(key)

    def forget_all(self) -> int:
        """Give the memory back."""
        with self._lock:
            keys = list(self._pages)
            self._pages.clear()
            self.told("removed", keys)
        return len(keys)

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._pages.clear()
