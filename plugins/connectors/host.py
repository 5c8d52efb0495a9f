"""``host``: pages in this process's memory, beyond the KV pool. What the pool evicts is found here again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from engine.core.config import parse_bytes
from engine.core.errors import ConfigError
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._store import StoreConnector, StoreOptions


class HostStore(StoreConnector):
    """A tier in host memory, least recently used pages go first. Source: the host tier of SGLang's HiCache."""

    name = "host"

    class Options(StoreOptions):
        capacity: str = Field("1GiB", description="memory for pages, e.g. 512MiB")

        @field_validator("capacity")
        @classmethod
        def _a_size(cls, value: str) -> str:
            try:
                parse_bytes(value)
            except ConfigError as error:
                raise ValueError(str(error)) from error
            return value

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._pages: OrderedDict[bytes, Bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._most = 0

    def open(self, layout: KVLayout) -> None:
        """Raises ``ConfigError`` where not even one page fits."""
        self._most = parse_bytes(self.options.capacity) // max(1, layout.page_bytes)
        if not self._most:
            raise ConfigError(
                f"connector host: capacity {self.options.capacity} does not hold one page of {layout.page_bytes} bytes"
            )

    def has(self, key: bytes) -> bool:
        """Whether the page is in memory."""
        return key in self._pages

    def get(self, key: bytes) -> Bytes | None:
        """The page itself: nobody writes to it."""
        return self._pages.get(key)

    def put(self, key: bytes, content: Bytes) -> None:
        """Keep a page, for another one if need be."""
        with self._lock:
            while len(self._pages) >= self._most:
                self._pages.popitem(last=False)
            self._pages[key] = content

    def touch(self, keys: Sequence[bytes]) -> None:
        """The last page of a prefix is the first to go: without those before it, it is worth nothing."""
        with self._lock:
            for key in reversed(keys):
                if key in self._pages:
                    self._pages.move_to_end(key)

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._pages.clear()
