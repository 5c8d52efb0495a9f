"""The other end of cache events: an index of what an engine has cached, kept up to date and never silently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import msgspec
import zmq

from engine.core.cache_events import POOL, CacheBatch, CacheEvent, CacheSnapshot, TooOld
from engine.core.errors import EngineError

Need = Literal["nothing", "replay", "snapshot"]


class CacheIndex:
    """Which pages can be found in an engine's tiers, by the events that it tells. Starts empty: ``load`` a snapshot.

    Example::

        index = CacheIndex()
        index.load(log.snapshot())
        for batch in stream:
            need = index.apply(batch)
            if need == "replay":  # events were lost: ask for those from index.sequence on
                ...
            elif need == "snapshot":  # the engine or its cache started anew
                ...

    Attributes:
        epoch: that of the entries; ``None`` before the first snapshot.
        sequence: the number of the next event.
        page_size: tokens a page.
        tiers: by name of the tier, the parent (or ``None``) of each page's key.
    """

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.sequence = 0
        self.page_size = 0
        self.tiers: dict[str, dict[bytes, bytes | None]] = {}
        self._over: list[str] = []  # epochs that have ended: what still comes of them is late

    def load(self, snapshot: CacheSnapshot) -> None:
        """Begin anew with these entries. Mutates."""
        if self.epoch not in (None, snapshot.epoch):
            self._over = [*self._over[-7:], str(self.epoch)]
        self.epoch, self.sequence, self.page_size = snapshot.epoch, snapshot.sequence, snapshot.page_size
        self.tiers = {}
        for event in snapshot.entries:
            self._enter(event)

    def apply(self, batch: CacheBatch, upto: int | None = None) -> Need:
        """Take in events; those known already are passed over. Mutates only if the answer is ``nothing``.

        Args:
            upto: take none of this number or a later one.

        Returns ``replay`` where events before it are missing, ``snapshot`` where it is of another epoch.
        """
        if batch.epoch != self.epoch:
            return "nothing" if batch.epoch in self._over else "snapshot"
        if batch.sequence > self.sequence:
            return "nothing" if upto is not None and self.sequence >= upto else "replay"
        end = batch.end if upto is None else min(batch.end, upto)
        for event in batch.events[self.sequence - batch.sequence : max(0, end - batch.sequence)]:
            self._enter(event)
            self.sequence += 1
        return "nothing"

    def pages(self, tier: str = POOL) -> set[bytes]:
        """The keys of all pages of a tier."""
        return set(self.tiers.get(tier, ()))

    def match(self, keys: Sequence[bytes], tier: str = POOL) -> int:
        """How many pages of a chain (``core.identity.page_digests``) the tier has, from the first on."""
        entries = self.tiers.get(tier, {})
        return next((at for at, key in enumerate(keys) if key not in entries), len(keys))

    def _enter(self, event: CacheEvent) -> None:
        entries = self.tiers.setdefault(event.tier, {})
        match event.kind:
            case "stored":
                entries[event.key] = event.parent
            case "removed":
                entries.pop(event.key, None)
            case "cleared":
                entries.clear()


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
