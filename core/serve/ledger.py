"""The client's books: which requests are open, and how each of the others ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from engine.core.errors import EngineError
from engine.core.plan import Delta
from engine.core.request import Finish
from engine.core.serve.messages import Abort, Started
from engine.core.serve.pace import Ends
from engine.core.serve.streams import Stream
from engine.core.serve.times import Tenants, Times

NAMES = 8192  # callers' ids that are remembered
NAMES_EACH = 128  # requests under one of them that are, the newest


class Ledger:
    """Every accepted request is entered once and closed once, under one reason, whoever ends it.

    Not thread-safe: it belongs to the thread that reads the streams.

    Attributes:
        times: how long requests have waited and run, as histograms.
        tenants: the same counts by who asked.
        closed: called with each request that has ended, which by then says how; what it raises is its own trouble and
            not allowed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.open: dict[str, Stream] = {}
        self.waiting_tokens = 0  # prompt tokens of requests that have brought nothing yet
        self.logprobs = 0  # that the open requests may come to
        self.ends = Ends()
        self._waiting: dict[str, int] = {}
        self._names: dict[str, tuple[str, ...]] = {}  # of callers, the oldest first -> the engine's
        self._clock = clock
        self.accepted = 0
        self.ended: Counter[str] = Counter({reason.value: 0 for reason in Finish})
        self.times = Times()
        self.tenants = Tenants()
        self.closed: list[Callable[[Stream, str], None]] = []

    def __len__(self) -> int:
        return len(self.open)

    def enter(self, stream: Stream) -> None:
        """A request was accepted."""
        self.open[stream.request_id] = stream
        self._waiting[stream.request_id] = stream.num_prompt
        self.waiting_tokens += stream.num_prompt
        self.accepted += 1
        self.logprobs += stream.logprobs_room
        if stream.external_id is not None:
            known = self._names.get(stream.external_id, ())
            self._names[stream.external_id] = (*known[1 - NAMES_EACH :], stream.request_id)
            if len(self._names) > NAMES:
                del self._names[next(iter(self._names))]
        stream.course.accepted = self._clock()
        self.tenants.accepted(stream.tenant)

    def started(self, news: Sequence[Started]) -> None:
        """The engine has begun these."""
        for one in news:
            self.times.started(one.waited, one.reason)
            if (stream := self.open.get(one.request_id)) is not None:
                stream.course.waited, stream.course.waited_for = one.waited, one.reason

    def under(self, external_id: str) -> list[Stream]:
        """Open requests that their caller knows by this id."""
        return [stream for stream in self.open.values() if stream.external_id == external_id]

    def names_of(self, external_id: str) -> list[str]:
        """The engine's names of the requests that came under this id, also of those that have ended, as far as they are
        remembered; the id itself where it is nobody's."""
        return list(self._names.get(external_id, [external_id]))

    def deliver(self, deltas: Sequence[Delta]) -> list[Abort]:
        """Hand news to the streams. Returns what the engine must be told about requests that ended on this side."""
        tell: list[Abort] = []
        now = self._clock()
        for delta in deltas:
            stream = self.open.get(delta.request_id)
            if stream is None:
                continue  # the caller left before this came
            if delta.tokens:
                if delta.request_id in self._waiting:
                    self._begun(stream)
                self.times.tokens(stream.course, len(delta.tokens), now)
            try:
                stop = stream.feed(delta)
            except Exception as error:  # text that cannot be decoded ends one request, not everybody's
                tell.append(Abort([delta.request_id], Finish.ERROR, f"undecodable output: {error}"))
                stream.fail(EngineError(f"the output could not be decoded: {error}"))
                self._close(stream, Finish.ERROR)
                continue
            if stop is not None and delta.finish is None:
                tell.append(Abort([delta.request_id], Finish.STOP, stop))
            if stream.finish_reason is not None:
                self._close(stream, Finish(stream.finish_reason))
        return tell

    def leave(self, streams: Sequence[Stream]) -> list[str]:
        """Their callers want these no more. Returns the ids that were still open."""
        gone = [stream for stream in dict.fromkeys(streams) if stream.request_id in self.open]
        for stream in gone:
            stream.end(Finish.ABORT)
            self._close(stream, Finish.ABORT)
        return [stream.request_id for stream in gone]

    def fail(self, streams: Sequence[Stream], error: Exception, reason: Finish = Finish.ERROR) -> None:
        """These cannot be brought to their end: ``error`` is what their callers see, ``reason`` what is counted."""
        for stream in streams:
            if stream.request_id in self.open:
                stream.fail(error)
                self._close(stream, reason)

    def _close(self, stream: Stream, reason: Finish) -> None:
        del self.open[stream.request_id]
        self.logprobs -= stream.logprobs_room
        self._begun(stream)
        self.ended[reason.value] += 1
        self.ends.add()
        course = stream.course
        course.ended = self._clock()
        self.times.ended(course)
        self.tenants.ended(stream, reason.value)
        for tell in self.closed:
            tell(stream, reason.value)

    def _begun(self, stream: Stream) -> None:
        self.waiting_tokens -= self._waiting.pop(stream.request_id, 0)
