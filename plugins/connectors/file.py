"""``file``: pages in files, one each. They outlive the process: after a restart, or kill -9, the prefixes are warm.

A file is written under another name and renamed, so that it is whole or not there. Its header names the layout and the
key and carries a checksum of the bytes: whatever happened to a file, its content is used only if it is what was saved.

    root/<layout digest>/<first two hex digits of the key>/<key in hex>
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from engine.core.config import parse_bytes
from engine.core.errors import ConfigError
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._store import StoreConnector, StoreOptions

MAGIC = b"sixhooks-page-1\n"
UNFINISHED = 60.0  # seconds after which a file that nobody has renamed belongs to a process that died
HEADER = struct.Struct("<16s32s32sQ16s")  # magic, layout digest, key, bytes, checksum


class DamagedPage(Exception):
    """A file is not what its name says: cut short, altered, or of another layout."""


class FileStore(StoreConnector):
    """A tier in the file system, least recently used files go first."""

    name = "file"

    class Options(StoreOptions):
        root: str = Field("", description="folder of the tier; engines of one kind may share it")
        capacity: str = Field("8GiB", description="most bytes in files of this layout, e.g. 20GiB")

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
        self._files: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._lock = threading.Lock()
        self._most = 0

    def open(self, layout: KVLayout) -> None:
        """Find what earlier processes left. Raises ``ConfigError``."""
        if not self.options.root:
            raise ConfigError("connector file: option root is needed: the folder to keep pages in")
        self._folder = Path(self.options.root) / layout.digest
        self._size = HEADER.size + layout.page_bytes
        self._digest = layout.digest.encode()
        self._most = parse_bytes(self.options.capacity) // self._size
        if not self._most:
            raise ConfigError(
                f"connector file: capacity {self.options.capacity} does not hold one page of {self._size} bytes"
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = sorted(self._scan())
        except OSError as error:
            raise ConfigError(f"connector file: root {self.options.root}: {error.strerror or error}") from error
        self._files = OrderedDict((key, None) for _, key in found)

    def has(self, key: bytes) -> bool:
        """Whether there is a file of this name, as far as this process knows."""
        return key in self._files

    def get(self, key: bytes) -> Bytes | None:
        """Read and check a page. A damaged file is deleted. Raises ``DamagedPage`` and ``OSError``."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._forget(key)
            return None
        try:
            content = self._checked(key, data)
        except DamagedPage:
            self._forget(key)
            path.unlink(missing_ok=True)
            raise
        os.utime(path)
        return content

    def put(self, key: bytes, content: Bytes) -> None:
        """Write a page beside its place and move it there. Raises ``OSError``, leaving nothing."""
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        header = HEADER.pack(MAGIC, self._digest, key, content.nbytes, _checksum(content.data))
        try:
            with beside.open("wb") as file:
                file.write(header)
                file.write(content.data)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        with self._lock:
            self._files[key] = None
            gone = [self._files.popitem(last=False)[0] for _ in range(len(self._files) - self._most)]
        for old in gone:
            self._path(old).unlink(missing_ok=True)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The last page of a prefix is the first to go."""
        with self._lock:
            for key in reversed(keys):
                if key in self._files:
                    self._files.move_to_end(key)

    # ---- inside

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._files.pop(key, None)

    def _scan(self) -> Iterator[tuple[float, bytes]]:
        """(last use, key) of every file of the right size; what a process that died has left unfinished is deleted."""
        for folder in self._folder.iterdir():
            for path in folder.iterdir():
                if "." in path.name:
                    if time.time() - path.stat().st_mtime > UNFINISHED:
                        path.unlink(missing_ok=True)
                elif (state := path.stat()).st_size == self._size:
                    yield state.st_mtime, bytes.fromhex(path.name)

    def _checked(self, key: bytes, data: bytes) -> Bytes:
        if len(data) != self._size:
            raise DamagedPage(f"{len(data)} bytes in a file that should have {self._size}")
        magic, layout, name, size, checksum = HEADER.unpack_from(data)
        if (magic, layout, name, size) != (MAGIC, self._digest, key, self._size - HEADER.size):
            raise DamagedPage("the header names another page, layout or version")
        content = memoryview(data)[HEADER.size :]
        if _checksum(content) != checksum:
            raise DamagedPage("the checksum does not fit the bytes")
        return np.frombuffer(content, np.uint8)


def _checksum(content: memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
