"""An index that follows an engine's cache events over ZMQ."""

from __future__ import annotations

from types import TracebackType

import msgspec
import zmq

from engine.core.cache_events import CacheBatch, CacheSnapshot, TooOld
from engine.core.cache_index import CacheIndex
from engine.core.errors import EngineError


class CacheSubscriber:
    """Keeps a ``CacheIndex`` by an engine's two ZMQ endpoints; what it loses, it asks for. One thread's.

    Args:
        events, replay: where the engine publishes and answers (``--cache-events``, ``--cache-events-replay``).
        topic: only messages whose topic begins so.
        patience: seconds to wait for an answer.

    Attributes:
        index: as of the last ``poll``. Empty before the first.
        replays, snapshots: how often something had to be asked for.
    """

    def __init__(self, events: str, replay: str, *, topic: str = "", patience: float = 5.0) -> None:
        self.index = CacheIndex()
        self.replays = self.snapshots = 0
        self._patience = patience
        self._where = replay
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._events.connect(events)
        self._asking: zmq.Socket[bytes] | None = None

    def poll(self, seconds: float, upto: int | None = None) -> bool:
        """Wait up to so many seconds for a message and take it in. False where none came. Mutates the index.

        Args:
            upto: take no event of this number or a later one: of the rest of the message nothing is kept.

        Raises:
            EngineError: events are missing, and nobody answers.
        """
        if self.index.epoch is None:
            self._start_anew()
        if not self._events.poll(int(seconds * 1000)):
            return False
        *_, data = self._events.recv_multipart()
        self.take(msgspec.msgpack.decode(data, type=CacheBatch), upto)
        return True

    def take(self, batch: CacheBatch, upto: int | None = None) -> None:
        """Take in a batch, and ask for what is missing before it. Mutates the index."""
        need = self.index.apply(batch, upto)
        if need == "replay":
            self._catch_up(batch.end, upto)
        elif need == "snapshot":
            self._start_anew()

    def close(self) -> None:
        """Free the sockets. Idempotent."""
        self._context.destroy(linger=0)

    def __enter__(self) -> CacheSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _catch_up(self, end: int, upto: int | None) -> None:
        self.replays += 1
        end = end if upto is None else min(end, upto)
        try:
            while self.index.sequence < end:
                number = self.index.sequence.to_bytes(8, "big")
                answer = self._ask(b"replay", (self.index.epoch or "").encode(), number)
                if self.index.apply(msgspec.msgpack.decode(answer, type=CacheBatch), upto) != "nothing":
                    break
        except TooOld:
            self._start_anew()

    def _start_anew(self) -> None:
        self.snapshots += 1
        self.index.load(msgspec.msgpack.decode(self._ask(b"snapshot"), type=CacheSnapshot))

    def _ask(self, *frames: bytes) -> bytes:
        """The answer's content. Raises ``TooOld``; ``EngineError`` where there is none."""
        if self._asking is None:
            self._asking = self._context.socket(zmq.DEALER)
            self._asking.connect(self._where)
        asking = self._asking
        asking.send_multipart(frames)
        if not asking.poll(int(self._patience * 1000)):
            asking.close(linger=0)  # a late answer is not to be taken for that of another question
            self._asking = None
            raise EngineError(f"{self._where} did not answer within {self._patience:g} s")
        kind, content = asking.recv_multipart()
        return content_of(kind, content)


def content_of(kind: bytes, content: bytes) -> bytes:
    """An answer's content. Raises ``TooOld``, or ``EngineError`` where the question was refused."""
    if kind == b"too old":
        raise TooOld(content.decode())
    if kind == b"error":
        raise EngineError(content.decode())
    return content
