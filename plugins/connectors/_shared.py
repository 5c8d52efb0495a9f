"""Processes of one host: the peer's KV memory is mapped, to read only, and this process copies what it needs.

Nobody else writes, so that a motion which is given up is over, and a peer that is killed or stopped holds nobody up:
the mapping stays good, and whether what lies in it is still what was leased is for the lease to say.

The peer's file is opened by way of ``/proc``. That is allowed to whoever could read the peer's memory anyway: the same
user, in sight of its process. It is the right file if it has the numbers, the size and the random mark that the card
names; across hosts and containers it does not, and then the pages travel by other ways.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from engine.core.memory import SharedMemory
from engine.plugins.connectors._pieces import spans, within
from engine.plugins.connectors._transport import Motion, Transport, TransportError, Words

SLICE = 4 << 20  # bytes that one look copies


class SharedTransport(Transport):
    """Pull: copies out of the peer's mapped memory, a few megabytes a look.

    Args:
        shared: where this process's memory lies for others; ``None``: nobody can read it this way.
    """

    name: ClassVar[str] = "shared"
    late_writes: ClassVar[bool] = False
    most: ClassVar[int] = 1 << 20

    def __init__(self, shared: SharedMemory | None) -> None:
        self._shared = shared
        self._held: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._peers: dict[str, _View] = {}

    def open(self, memory: Sequence[NDArray[np.uint8]]) -> str:
        """The card names the file only if all memory lies in it."""
        self._held = spans(memory)
        shared = self._shared
        if shared is None or not all(_inside(span, shared) for span in self._held):
            return ""
        state = os.fstat(shared.fd)
        return json.dumps(
            {
                "pid": os.getpid(), "fd": shared.fd, "device": state.st_dev, "inode": state.st_ino,
                "size": shared.size, "start": shared.start, "mark": shared.mark.hex(),
            }
        )  # fmt: skip

    def connect(self, peer: str, card: str) -> None:
        """Map its memory. Another card of a peer replaces what was known of it."""
        with self._lock:
            known = self._peers.get(peer)
        if known is not None and known.card == card:
            return
        view = _View(card)
        with self._lock:
            self._peers[peer] = view

    def disconnect(self, peer: str) -> None:
        """Its memory is unmapped when no motion looks at it any more."""
        with self._lock:
            view = self._peers.pop(peer, None)
        if view is not None:
            view.gone = True

    def begin(self, peer: str, ours: Words, theirs: Words, lengths: Words) -> SharedMotion:
        """Nothing is copied yet."""
        with self._lock:
            view = self._peers.get(peer)
        if view is None:
            raise TransportError(f"shared memory: peer {peer} is not connected")
        if not within(ours, lengths, self._held):
            raise TransportError("shared memory: pieces outside of the memory here")
        if not within(theirs, lengths, [(view.start, view.size)]):
            raise TransportError(f"shared memory: pieces outside of peer {peer}'s memory")
        return SharedMotion(view, ours.tolist(), (theirs - np.uint64(view.start)).tolist(), lengths.tolist())

    def close(self) -> None:
        """Unmap everything."""
        for peer in list(self._peers):
            self.disconnect(peer)


class SharedMotion(Motion):
    """A copy in slices: each look does one."""

    def __init__(self, view: _View, ours: list[int], offsets: list[int], lengths: list[int]) -> None:
        self._view = view
        self._left = list(zip(ours, offsets, lengths, strict=True))[::-1]
        self._state: Literal["moving", "done", "failed"] = "moving"

    def state(self) -> Literal["moving", "done", "failed"]:
        """Copy the next slice. Other threads compute meanwhile: ``memmove`` runs without the interpreter's lock."""
        if self._state == "moving" and self._view.gone:
            self._state, self.reason = "failed", "shared memory: the peer was disconnected"
        if self._state == "moving":
            base, left, budget = self._view.address, self._left, SLICE
            while left and budget > 0:
                here, offset, length = left.pop()
                if length > budget:
                    left.append((here + budget, offset + budget, length - budget))
                    length = budget
                ctypes.memmove(here, base + offset, length)
                budget -= length
            if not left:
                self._state = "done"
        return self._state

    def drop(self) -> None:
        """Nothing is copied any more."""
        self._left = []
        if self._state == "moving":
            self._state, self.reason = "failed", "shared memory: it was dropped"


class _View:
    """A peer's memory, mapped to read.

    Raises:
        TransportError: it cannot be, or it is another process's.
    """

    def __init__(self, card: str) -> None:
        said = _parsed(card)
        self.card, self.gone = card, False
        self.start, self.size = said["start"], said["size"]
        try:
            fd = os.open(f"/proc/{said['pid']}/fd/{said['fd']}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"shared memory: the peer's cannot be opened: {error.strerror}") from None
        try:
            state = os.fstat(fd)
            if (state.st_dev, state.st_ino, state.st_size) != (said["device"], said["inode"], self.size):
                raise TransportError("shared memory: what lies there is another file")
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise TransportError("shared memory: the peer could make the file shorter while it is read")
            self._memory = np.frombuffer(mmap.mmap(fd, self.size, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise TransportError(f"shared memory: the peer's cannot be mapped: {error.strerror}") from None
        finally:
            os.close(fd)
        mark = bytes.fromhex(said["mark"])
        if not mark or self._memory[: len(mark)].tobytes() != mark:
            raise TransportError("shared memory: what lies there is not the peer's")
        self.address = self._memory.ctypes.data


def _parsed(card: str) -> dict[str, Any]:
    """Raises ``TransportError``."""
    if sys.platform != "linux":
        raise TransportError("shared memory: only Linux has it")
    if not card:
        raise TransportError("shared memory: the peer's is its own")
    names = ("pid", "fd", "device", "inode", "size", "start")
    try:
        said = dict(json.loads(card))
        bytes.fromhex(said["mark"])
        if all(type(said[name]) is int and said[name] >= 0 for name in names):
            return said
    except (ValueError, TypeError, KeyError):
        pass
    raise TransportError("shared memory: the peer's card makes no sense")


def _inside(span: tuple[int, int], shared: SharedMemory) -> bool:
    return shared.start <= span[0] and sum(span) <= shared.start + shared.size
