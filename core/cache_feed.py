"""Cache events over ZMQ: a thread beside the engine publishes them and answers who missed some.

Published (to SUB sockets): ``[topic, number of the first event (8 bytes, big-endian), CacheBatch as msgpack]``; once a
second without news, and for each new subscriber, a batch without events, so that a loss at the end is seen, too.
Asked (ROUTER; from DEALER or REQ): ``["replay", epoch or "", number (8 bytes)]`` → ``["batch", CacheBatch]``, one of
many if there are many, or ``["too old", words]``; ``["snapshot"]`` → ``["snapshot", CacheSnapshot]``; anything else →
``["error", words]``. Who reads slowly loses messages, which the numbers show; the engine never waits for anybody.
Source: the KV event publisher of vLLM, which has the same two sockets.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
import time

import msgspec
import zmq

from engine.core.cache_events import CacheBatch, CacheLog, TooOld, nobody
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError

HEARTBEAT = 1.0  # seconds of silence after which a batch without events is published
QUEUED = 1000  # messages that wait for a slow subscriber; more are dropped
ANSWERS = 8  # answers that wait for one who does not read them: a snapshot may be large
QUESTION = 4096  # bytes; a question is short
CLOSE_SECONDS = 5.0


class CacheFeed:
    """The two sockets and their thread.

    Args:
        log: what is published.
        endpoint, replay: where to listen beside the private sockets, e.g. ``tcp://127.0.0.1:5557``.
        topic: the first frame of what is published.
        directory: where the private sockets lie (default: a new one that goes with the feed).

    Attributes:
        endpoints: where subscribers of this machine and user find it: ``events``, ``replay``, ``topic``.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self,
        log: CacheLog,
        *,
        endpoint: str | None = None,
        replay: str | None = None,
        topic: str = "cache",
        directory: str | None = None,
    ) -> None:
        self.log = log
        self._topic = topic.encode()
        self._own = None if directory else tempfile.mkdtemp(prefix="engine-cache-")
        home = directory or self._own
        self.endpoints = {"events": f"ipc://{home}/cache", "replay": f"ipc://{home}/cache-replay", "topic": topic}
        self.public = {"events": endpoint, "replay": replay, "topic": topic}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.XPUB)  # PUB that sees who subscribes
        self._events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._events.setsockopt(zmq.SNDHWM, QUEUED)
        self._asked = self._context.socket(zmq.ROUTER)
        self._asked.setsockopt(zmq.SNDHWM, ANSWERS)
        for sock in (self._events, self._asked):
            sock.setsockopt(zmq.MAXMSGSIZE, QUESTION)
        self._wake_in, self._wake_out = socket.socketpair()
        self._awake = False
        self._closing = False
        self._thread: threading.Thread | None = None
        try:
            for sock, places in (
                (self._events, (self.endpoints["events"], endpoint)),
                (self._asked, (self.endpoints["replay"], replay)),
            ):
                for place in places:
                    if place is not None:
                        listen(sock, place)
        except ConfigError:
            self.close()
            raise

    def start(self) -> None:
        """Publish from now on. Called once."""
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="engine-cache-feed", daemon=True)
        self.log.news = self._wake
        self._thread.start()

    def close(self) -> None:
        """Stop, and free sockets and files. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.log.news = nobody
        if self._thread is not None:
            self._awake = False
            self._wake()
            self._thread.join(CLOSE_SECONDS)
        self._wake_in.close()
        self._wake_out.close()
        self._context.destroy(linger=0)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _wake(self) -> None:
        """There is news. From any thread; never blocks."""
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):  # there are bytes enough to wake it, or it was closed this moment
                self._wake_in.send(b"!")

    # ---- the thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        for readable in (self._events, self._asked, self._wake_out):
            poller.register(readable, zmq.POLLIN)
        epoch, at = self.log.epoch, 0
        spoke = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(max(0, int((spoke + HEARTBEAT - time.monotonic()) * 1000) + 1)))
            if self._wake_out.fileno() in ready:
                self._wake_out.recv(4096)
                self._awake = False  # before looking: what comes now wakes it again
            joined = self._joined() if self._events in ready else False
            if self._asked in ready:
                self._answer_all()
            quiet = joined or time.monotonic() - spoke >= HEARTBEAT
            epoch, at, sent = self._publish(epoch, at, speak=quiet)
            if sent:
                spoke = time.monotonic()

    def _joined(self) -> bool:
        """Read who came and went; True if somebody came."""
        joined = False
        with contextlib.suppress(zmq.Again):
            while True:
                joined |= self._events.recv(zmq.NOBLOCK)[:1] == b"\1"
        return joined

    def _publish(self, epoch: str, at: int, *, speak: bool) -> tuple[str, int, bool]:
        """Publish what is new since event ``at`` of the epoch; ``speak``: say something anyway."""
        sent = False
        while True:
            try:
                batch = self.log.replay(epoch, at)
            except TooOld:  # another epoch, or so much at once that the log has dropped some: subscribers see a gap
                epoch, at = self.log.oldest
                continue
            if not batch.events and (sent or not speak):
                return epoch, at, sent
            self._send(batch)
            sent = True
            at = batch.end
            if not batch.events:
                return epoch, at, sent

    def _send(self, batch: CacheBatch) -> None:
        data = msgspec.msgpack.encode(batch)
        self._events.send_multipart([self._topic, batch.sequence.to_bytes(8, "big"), data], zmq.NOBLOCK)

    def _answer_all(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                sender, *frames = self._asked.recv_multipart(zmq.NOBLOCK)
                envelope = [sender, b""] if frames and not frames[0] else [sender]
                answer = self._answer(frames[len(envelope) - 1 :])
                # A ROUTER drops what a peer does not read; only a peer that is gone is told of, and needs no answer.
                self._asked.send_multipart([*envelope, *answer], zmq.NOBLOCK)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        match frames:
            case [b"replay", epoch, number] if len(number) == 8:
                try:
                    name = epoch.decode("ascii", "replace") or None
                    batch = self.log.replay(name, int.from_bytes(number, "big"))
                except TooOld as error:
                    return [b"too old", str(error).encode()]
                return [b"batch", msgspec.msgpack.encode(batch)]
            case [b"snapshot"]:
                return [b"snapshot", msgspec.msgpack.encode(self.log.snapshot())]
        return [b"error", b"ask for: replay EPOCH NUMBER (8 bytes, big-endian), or: snapshot"]


def listen(sock: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a socket. Raises ``ConfigError``."""
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cache_events: cannot listen on {endpoint}: {error.strerror}") from error


def feed_of(config: EngineConfig, directory: str | None = None) -> CacheFeed:
    """The feed that a configuration with cache events asks for. Raises ``ConfigError``."""
    log = CacheLog(config.page_size, history=config.cache_events_history, with_tokens=config.cache_events_tokens)
    endpoint = None if config.cache_events == "on" else config.cache_events
    replay = None if endpoint is None else config.cache_events_replay or next_port(endpoint)
    return CacheFeed(log, endpoint=endpoint, replay=replay, topic=config.cache_events_topic, directory=directory)


def next_port(endpoint: str) -> str:
    """Where missed events are asked for unless configured: the port after that of a TCP endpoint, a file beside."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + 1}" if endpoint.startswith("tcp://") else f"{endpoint}-replay"
