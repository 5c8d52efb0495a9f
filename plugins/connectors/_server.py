"""What stores on a server share: others use it, too, and it does not say what it has evicted."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from engine.plugins.connectors._store import StoreConnector

VOUCHED = 100_000  # pages that were kept last, and are told of


class ServerStore(StoreConnector):
    """A tier on a server. Of what it keeps there, whoever listens is told of the last ``VOUCHED`` pages at most: others
    may be there or not, and it would be told of for ever."""

    remote = True
    threads = 2
    slice_bytes = 4 * 2**20

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._vouched: OrderedDict[bytes, None] = OrderedDict()
        self._telling = threading.Lock()

    def told(self, kind: Any, keys: Sequence[bytes]) -> None:
        """As of every store; what is told of for the longest is no longer, where there are too many. Mutates."""
        if self.notice is None:
            return
        with self._telling:
            for key in keys:
                self._vouched.pop(key, None)
                if kind == "stored":
                    self._vouched[key] = None
            super().told(kind, keys)
            spare = len(self._vouched) - VOUCHED
            super().told("removed", [self._vouched.popitem(last=False)[0] for _ in range(spare)])

    def told_all_gone(self) -> None:
        """Nothing is there any more. Mutates."""
        self.told("removed", list(self._vouched))
