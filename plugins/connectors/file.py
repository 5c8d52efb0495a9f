"""``file``: pages in files, one each. They outlive the process: after a restart, or kill -9, the prefixes are warm.

A file is written under another name and renamed, so that it is whole or not there; it is a frame (``_frames``), so
damage is found out.

    root/<layout digest>/<first two hex digits of the key>/<key in hex>

Others may delete files at any moment: engines that share the folder, and people. So what is offered anew is looked for,
and once a page was found damaged, each other one is read once before it is believed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from engine.core.config import Size
from engine.core.errors import ConfigError
from engine.core.identity import first_known
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._frames import HEADER, DamagedPage, header_of, unframed
from engine.plugins.connectors._store import StoreConnector, StoreOptions

UNFINISHED = 60.0  # seconds after which a file that nobody has renamed belongs to a process that died
CLEARED = ".cleared"
NAME = re.compile(r"[0-9a-f]{64}")


class FileStore(StoreConnector):
    """A tier in the file system, least recently used files go first."""

    name = "file"

    class Options(StoreOptions):
        root: str = Field("", description="folder of the tier; engines of one kind may share it")
        capacity: Size = Field("8GiB", description="most bytes in files of this layout, e.g. 20GiB")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._files: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._doubted: set[bytes] = set()  # to be read before they are believed to be there
        self._lock = threading.Lock()  # for moments: the engine's thread takes it, too
        self._changing = threading.Lock()  # for as long as a file is written or deleted, by one thread of several
        self._most = self._cleared = 0

    def open(self, layout: KVLayout) -> None:
        """Find what earlier processes left. Raises ``ConfigError``."""
        if not self.options.root:
            raise ConfigError("connector file: option root is needed: the folder to keep pages in")
        self._folder = Path(self.options.root) / layout.digest
        self._size = HEADER.size + layout.page_bytes
        self._most = self.room(self._size)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.parent.glob(f"{layout.digest}{CLEARED}*"):
                shutil.rmtree(left, ignore_errors=True)
            found = sorted(self._scan())
        except OSError as error:
            raise ConfigError(f"connector file: root {self.options.root}: {error.strerror or error}") from error
        self._files = OrderedDict.fromkeys(key for _, key in found)
        self.told("stored", list(self._files))

    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first have a file, as far as this process knows."""
        return first_known(keys, self._files)

    def get_many(self, keys: Sequence[bytes]) -> Sequence[Bytes | Exception | None]:
        """Read and check pages. A damaged file is deleted."""
        found: list[Bytes | Exception | None] = []
        for key in keys:
            try:
                content = self._read(key)
            except (OSError, DamagedPage) as error:
                return [*found, error]
            found.append(content)
            if content is None:
                break
        return found

    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """Write pages beside their places and move them there. Raises ``OSError``, leaving nothing of that page."""
        for key, content in zip(keys, contents, strict=True):
            for old in self._add(key, content):
                self._evict(old)

    def lacking(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Places of the keys that have no file, or a damaged one where there is reason to look. Mutates."""
        for key in keys:
            try:
                if key in self._doubted:
                    self._read(key)
                elif key in self._files and not self._path(key).exists():
                    self._forget(key)
            except (OSError, DamagedPage) as error:
                self.failed(error)
        return super().lacking(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The last page of a prefix is the first to go."""
        with self._lock:
            for key in reversed(keys):
                if key in self._files:
                    self._files.move_to_end(key)

    def forget_all(self) -> int:
        """Set the folder aside, and delete it later."""
        with self._lock:
            keys = list(self._files)
            self._files.clear()
            self._cleared += 1
            aside = self._folder.with_name(f"{self._folder.name}{CLEARED}.{os.getpid()}.{self._cleared}")
            with contextlib.suppress(FileNotFoundError):  # somebody has cleared it already
                self._folder.replace(aside)
            self._folder.mkdir(parents=True, exist_ok=True)
            self.told("removed", keys)
        parts = [*aside.glob("*"), aside]

        def delete() -> bool:
            shutil.rmtree(parts.pop(0), ignore_errors=True)
            return bool(parts)

        self.later(delete)
        return len(keys)

    # ---- inside

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / name

    def _read(self, key: bytes) -> Bytes | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            self._forget(key)
            return None
        except OSError:
            self._forget(key)  # so that it is written anew
            raise
        try:
            content = unframed(self._layout.digest, key, self._layout.page_bytes, data)
        except DamagedPage:
            path.unlink(missing_ok=True)
            with self._lock:
                self._doubted.update(self._files)
            self._forget(key)
            raise
        self._doubted.discard(key)
        with contextlib.suppress(OSError):  # it may be gone meanwhile, and was read all the same
            os.utime(path)
        return content

    def _add(self, key: bytes, content: Bytes) -> list[bytes]:
        """Write a page; the keys of those that it has no room for any more. Raises ``OSError``."""
        with self._changing:
            cleared = self._cleared
            self._write(key, content)
            with self._lock:
                if cleared == self._cleared:
                    self._files[key] = None
                    self._doubted.discard(key)
                    self.told("stored", [key])
                    return [self._files.popitem(last=False)[0] for _ in range(len(self._files) - self._most)]
            self._path(key).unlink(missing_ok=True)  # all was forgotten while it was written
            return []

    def _write(self, key: bytes, content: Bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with beside.open("wb") as file:
                file.write(header_of(self._layout.digest, key, content))
                file.write(content.data)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def _evict(self, key: bytes) -> None:
        """Delete the file; whoever wants what is evicted is given it. Damage is nothing to hand on."""
        content = None
        if self.spill is not None:
            try:
                content = self._read(key)
            except (OSError, DamagedPage) as error:
                self.failed(error)
        with self._changing:
            if key in self._files:  # written anew meanwhile
                return
            self._path(key).unlink(missing_ok=True)
            self._doubted.discard(key)
            self.told("removed", [key])
        if content is not None and self.spill is not None:
            self.spill([key], [content])

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._files.pop(key, None)
            self._doubted.discard(key)
            self.told("removed", [key])

    def _scan(self) -> Iterator[tuple[float, bytes]]:
        """(last use, key) of every file of the right size; what a process that died has left unfinished is deleted."""
        for path in self._folder.glob("*/*"):
            try:
                state = path.stat()
            except FileNotFoundError:  # another engine has evicted it
                continue
            if "." in path.name:
                if time.time() - state.st_mtime > UNFINISHED:
                    path.unlink(missing_ok=True)
            elif state.st_size == self._size and NAME.fullmatch(path.name):
                yield state.st_mtime, bytes.fromhex(path.name)
