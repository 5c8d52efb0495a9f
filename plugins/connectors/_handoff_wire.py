"""What two engines say to each other, byte by byte.

A message is a head (mark, kind, number of the question that it belongs to, bytes that follow) and a body. Whoever asks
numbers the questions and the answers repeat the number, so that a line that loses, repeats or delays bytes is noticed
at the next head; page bytes carry a checksum besides.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, ClassVar

PROTOCOL = 2
HEAD = struct.Struct(">2sBII")  # mark, kind, question, bytes that follow
MARK = b"kv"
KEY = 32  # bytes of a content key
PIECES = 512  # most rows of KV memory in one system call (the kernel takes 1024)
SHORT = 1 << 17  # most bytes of a message from somebody who has not said hello
LONG = 1 << 26  # most bytes of any other

PREFIX = struct.Struct(">QII")  # claim or 0, pages that are enough, milliseconds to wait for them; then keys
FOUND = struct.Struct(">QI")  # claim, pages
CLAIM = struct.Struct(">Q")  # of RENEW, RELEASE and PLACES (there with keys); the number of a WANT, of REVOKE
READ = struct.Struct(">Q?")  # claim, whether to send checksums; then keys
GIVING = struct.Struct(">I")  # pages that follow
PAGES = struct.Struct(">III")  # number of the first, how many, checksum of their bytes or 0; then the bytes
WANT = struct.Struct(">QQQ?")  # number, claim, offset in the staging area, whether to say a checksum; then keys
DONE = struct.Struct(">II")  # pages that were written, checksum of their bytes or 0
FAILED = struct.Struct(">?")  # whether nothing is written any more; then words


class Kind(IntEnum):
    """Kinds of messages."""

    GREETING = 1  # server, at once: its protocol and a nonce
    HELLO = 2  # client: who it is, a nonce, proof of the token
    WELCOME = 3  # server: who it is, proof of the token
    REFUSED = 4  # server: why; the connection ends
    PREFIX = 5  # client: how many of these pages are there?
    FOUND = 6
    READ = 7  # client: send them
    GIVING = 8
    PAGES = 9
    END = 10
    RENEW = 11  # client: I still want them
    RELEASE = 12  # client: I do not need them any more
    HELD = 13  # server: they were there until now
    EXPIRED = 14  # server: the lease had ended
    PLACES = 15  # client: where do these pages lie?
    PLACED = 16  # server: their numbers
    WANT = 17  # client: write them here
    BUSY = 18  # server: I am at it; any number of them before an answer
    DONE = 19  # server: they are written
    FAILED = 20  # server: they are not, and why
    REVOKE = 21  # client: is what I wanted still being written? If it is not begun, do not begin. HELD: yes


class LineError(Exception):
    """The other side is gone, silent, or does not speak the protocol.

    Class attribute ``well``: the line is as it was, and may be used for the next question.
    """

    well: ClassVar[bool] = False


class Refused(LineError):
    """The other side will not have us, or we will not have it; the words say why."""


class LeaseEnded(LineError):
    """The peer is well, but does not have the pages any more."""

    well = True


def parsed(body: bytes) -> dict[str, Any]:
    """A body of named values. Raises ``LineError``."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise LineError("it does not speak this protocol")
    return said


class Line:
    """One TCP connection. One thread at a time uses it; ``cut`` may be called from any.

    Args:
        stall: seconds without a byte after which the other side is given up.
    """

    def __init__(self, sock: socket.socket, stall: float) -> None:
        self.socket = sock
        self.stall = stall
        self.question = 0
        self._cut = threading.Event()
        self._ending = threading.Lock()  # so that nobody shuts down a descriptor that is another connection's by now
        sock.settimeout(stall)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def cut(self) -> None:
        """End it: whoever sends or receives stops. Bytes that have come already are not taken any more."""
        self._cut.set()
        with self._ending:
            try:
                self.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        """Give the socket back."""
        self._cut.set()
        with self._ending:
            self.socket.close()

    @property
    def stale(self) -> bool:
        """Whether an idle line has ended, or holds bytes that nobody asked for."""
        try:
            self.socket.setblocking(False)
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self._cut.is_set()
        except OSError:
            return True
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(self.stall)
        return True

    def send(self, kind: Kind, body: bytes = b"", rows: Sequence[memoryview] = (), until: float | None = None) -> None:
        """One message: the body, then rows of KV memory as they lie. Raises ``LineError``."""
        length = len(body) + sum(row.nbytes for row in rows)
        pieces = [memoryview(HEAD.pack(MARK, kind, self.question, length) + body), *rows]
        self._move(pieces, lambda batch: self.socket.sendmsg(batch), until)

    def receive(self, most: int = LONG) -> tuple[Kind, bytes]:
        """The next question and its body. Raises ``LineError``."""
        kind, self.question, length = self._head(most)
        return kind, self.take(length)

    def answer(self, *kinds: Kind) -> tuple[Kind, bytes]:
        """The answer to the question asked last. Raises ``LineError``, and ``Refused`` with the other side's words."""
        kind, length = self.answer_head()
        if kind not in kinds and kind is not Kind.REFUSED:
            raise LineError(f"it answers {kind.name}")
        body = self.take(length)
        if kind is Kind.REFUSED:
            raise Refused(body.decode(errors="replace"))
        return kind, body

    def answer_head(self) -> tuple[Kind, int]:
        """Kind and length of an answer whose body is still to be taken. Raises ``LineError``."""
        kind, question, length = self._head(LONG)
        while kind is Kind.BUSY and question == self.question and not length:
            kind, question, length = self._head(LONG)
        if question != self.question:
            raise LineError(f"it answers question {question} and not {self.question}")
        return kind, length

    def ask(self, kind: Kind, body: bytes, *answers: Kind) -> tuple[Kind, bytes]:
        """A question and its answer. Raises ``LineError``."""
        self.question = (self.question + 1) & 0xFFFFFFFF
        self.send(kind, body)
        return self.answer(*answers)

    def take(self, length: int) -> bytes:
        """So many bytes. Raises ``LineError``."""
        content = bytearray(length)
        self.fill([memoryview(content)])
        return bytes(content)

    def fill(self, rows: Sequence[memoryview]) -> None:
        """Fill rows of memory, in order. Mutates them. Raises ``LineError``; nothing is written after it returned."""

        def some(batch: Sequence[memoryview]) -> int:
            count = self.socket.recvmsg_into(batch)[0]
            if not count:
                raise LineError("it closed the connection")
            return count

        self._move(rows, some, None)

    # ---- inside

    def _head(self, most: int) -> tuple[Kind, int, int]:
        mark, kind, question, length = HEAD.unpack(self.take(HEAD.size))
        if mark != MARK or kind not in Kind._value2member_map_:
            raise LineError("it does not speak this protocol")
        if length > most:
            raise LineError(f"a message of {length} bytes: {most} is the limit")
        return Kind(kind), question, length

    def _move(
        self, rows: Sequence[memoryview], some: Callable[[Sequence[memoryview]], int], until: float | None
    ) -> None:
        """Move the rows' bytes, as many rows at once as the kernel takes."""
        left = [row for row in rows if row.nbytes]
        at = 0
        while at < len(left):
            if self._cut.is_set():
                raise LineError("the connection was cut")
            if until is not None and time.monotonic() > until:
                raise LineError("it takes too long")
            try:
                count = some(left[at : at + PIECES])
            except TimeoutError:
                raise LineError(f"nothing moved for {self.stall:g} seconds") from None
            except OSError as error:
                raise LineError(error.strerror or str(error)) from None
            while at < len(left) and count >= left[at].nbytes:
                count -= left[at].nbytes
                at += 1
            if count:
                left[at] = left[at][count:]


def split_keys(packed: bytes) -> list[bytes]:
    """Keys that stand one after the other. Raises ``LineError``."""
    if len(packed) % KEY:
        raise LineError("keys have 32 bytes each")
    return [packed[at : at + KEY] for at in range(0, len(packed), KEY)]


def unpacked(form: struct.Struct, body: bytes) -> tuple[int, ...]:
    """The numbers of a body of fixed form. Raises ``LineError``."""
    if len(body) != form.size:
        raise LineError(f"{len(body)} bytes where {form.size} are due")
    return form.unpack(body)
