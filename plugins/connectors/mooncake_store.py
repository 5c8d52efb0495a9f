"""``mooncake-store``: pages in the memory of all engines that share a Mooncake master.

    <prefix>:<layout digest>:<key in hex>   ->   a frame (``_frames``)

Each engine adds a segment of memory; the master knows what lies where, and evicts. What the library does here: a second
put on a key keeps the old value and returns 0, so what is damaged is removed first; a missing page and a dead master
both read as nothing, so the master is asked which it was; a master that is stopped is waited for without end, so calls
that hang are left to their thread; without a master the set-up takes a minute, so it is looked for first.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from engine.core.config import Size, parse_bytes
from engine.core.errors import ConfigError
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._frames import DamagedPage, header_of, unframed
from engine.plugins.connectors._health import Unreachable
from engine.plugins.connectors._jobs import GOODBYE
from engine.plugins.connectors._store import StoreConnector, StoreOptions

FULL, MISSING = -200, -704
HINT = (
    "connector mooncake-store needs Mooncake: pip install --no-deps mooncake-transfer-engine-non-cuda, and the system "
    "library libibverbs1"
)


class MooncakeStore(StoreConnector):
    """A tier in the memory of several machines. Source: Mooncake Store."""

    name = "mooncake-store"
    remote = True
    threads = 2
    slice_bytes = 4 * 2**20

    class Options(StoreOptions):
        master: str = Field("127.0.0.1:50051", description="HOST:PORT of mooncake_master")
        hostname: str = Field("127.0.0.1", description="address at which others reach this engine's segment")
        segment: Size = Field("256MiB", description="memory that this engine adds to the store, e.g. 4GiB")
        buffer: Size = Field("64MiB", description="memory for pages under way")
        protocol: Literal["tcp", "rdma"] = Field("tcp", description="how pages travel")
        device: str = Field("", description="rdma: which device, e.g. mlx5_0")
        prefix: str = Field("sixhooks", description="how the keys in the store begin")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._client: Any = None
        self._connecting = threading.Lock()

    def open(self, layout: KVLayout) -> None:
        """Find the library; the master need not be there yet. Raises ``ConfigError``."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(f"{HINT} ({error})") from error
        self._make = MooncakeDistributedStore
        self._front = f"{self.options.prefix}:{layout.digest}:"

    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first are there; the master keeps those for a while. Raises ``Unreachable``."""
        answers = self._connected().batch_is_exist(self._names(keys))
        for at, answer in enumerate(answers):
            if answer < 0:
                raise Unreachable(f"the master answers {answer}")
            if answer != 1:
                return at
        return len(keys)

    def get_many(self, keys: Sequence[bytes]) -> Sequence[Bytes | Exception | None]:
        """Fetch and check pages. What is not a page of ours is removed. Raises ``Unreachable``."""
        names = self._names(keys)
        found: list[Bytes | Exception | None] = []
        for key, name, value in zip(keys, names, self._connected().get_batch(names), strict=True):
            if not value:
                self.has_many([key])
                self.told("removed", [key])
                return [*found, None]
            try:
                found.append(unframed(self._layout.digest, key, self._layout.page_bytes, value))
            except DamagedPage as error:
                self._client.remove(name, True)
                self.told("removed", [key])
                return [*found, error]
        return found

    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """Put one after the other. Raises ``Unreachable``, and ``OSError`` where the store refuses one (it is full)."""
        client = self._connected()
        for key, name, content in zip(keys, self._names(keys), contents, strict=True):
            code = client.put(name, header_of(self._layout.digest, key, content) + content.tobytes())
            if code == FULL:
                raise OSError(f"the store is full ({code})")
            if code:
                raise Unreachable(f"put: {code}")
            self.told("stored", [key])

    def forget_all(self) -> int:
        """Remove the pages of this layout, whoever saved them. Raises ``Unreachable``."""
        gone = int(self._connected().remove_by_regex(f"^{re.escape(self._front)}.*", True))
        if gone < 0:
            raise Unreachable(f"remove: {gone}")
        return gone

    def close(self) -> None:
        """Take the segment out of the store. A library that hangs is left behind."""
        super().close()
        if self._client is not None:
            leaving = threading.Thread(target=self._client.close, name=f"engine-{self.name}-close", daemon=True)
            leaving.start()
            leaving.join(GOODBYE)

    # ---- inside

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._front + key.hex() for key in keys]

    def _look_for_master(self) -> None:
        host, _, port = self.options.master.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=self.patience / 4).close()
        except (OSError, ValueError) as error:
            raise Unreachable(f"no master at {self.options.master}: {error}") from error

    def _connected(self) -> Any:
        """The client, once the master is there. Raises ``Unreachable``."""
        with self._connecting:
            if self._client is None:
                options = self.options
                self._look_for_master()
                client = self._make()
                code = client.setup(
                    options.hostname, "P2PHANDSHAKE", parse_bytes(options.segment), parse_bytes(options.buffer),
                    options.protocol, options.device, options.master,
                )  # fmt: skip
                if code:
                    client.close()
                    raise Unreachable(f"no master at {options.master} ({code})")
                self._client = client
            return self._client
