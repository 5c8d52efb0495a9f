"""The client's books: which requests are open, and how each of the others ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.core.errors import EngineError
from engine.core.plan import Delta
from engine.core.request import Finish
from engine.core.serve.messages import Abort
from engine.core.serve.pace import Ends
from engine.core.serve.streams import Stream


class Ledger:
    """Every accepted request is entered once and closed once, under one reason, whoever ends it.

    Not thread-safe: it belongs to the thread that reads the streams.
    """

    def __init__(self) -> None:
        self.open: dict[str, Stream] = {}
        self.waiting_tokens = 0  # prompt tokens of requests that have brought nothing yet
        self.ends = Ends()
        self._waiting: dict[str, int] = {}
        self.accepted = 0
        self.ended: Counter[str] = Counter({reason.value: 0 for reason in Finish})

    def __len__(self) -> int:
        return len(self.open)

    def enter(self, stream: Stream) -> None:
        """A request was accepted."""
        self.open[stream.request_id] = stream
        self._waiting[stream.request_id] = stream.num_prompt
        self.waiting_tokens += stream.num_prompt
        self.accepted += 1

    def under(self, external_id: str) -> list[Stream]:
        """Open requests that their caller knows by this id."""
        return [stream for stream in self.open.values() if stream.external_id == external_id]

    def deliver(self, deltas: Sequence[Delta]) -> list[Abort]:
        """Hand news to the streams. Returns what the engine must be told about requests that ended on this side."""
        tell: list[Abort] = []
        for delta in deltas:
            stream = self.open.get(delta.request_id)
            if stream is None:
                continue  # the caller left before this came
            if delta.tokens and delta.request_id in self._waiting:
                self._begun(stream)
            try:
                stop = stream.feed(delta)
            except Exception as error:  # text that cannot be decoded ends one request, not everybody's
                tell.append(Abort([delta.request_id], Finish.ERROR, f"undecodable output: {error}"))
                self._close(stream, Finish.ERROR)
                stream.fail(EngineError(f"the output could not be decoded: {error}"))
                continue
            if stop is not None and delta.finish is None:
                tell.append(Abort([delta.request_id], Finish.STOP, stop))
            if stream.finish_reason is not None:
                self._close(stream, Finish(stream.finish_reason))
        return tell

    def leave(self, streams: Sequence[Stream]) -> list[str]:
        """Their callers want these no more. Returns the ids that were still open."""
        gone = [stream for stream in streams if stream.request_id in self.open]
        for stream in gone:
            self._close(stream, Finish.ABORT)
            stream.end(Finish.ABORT)
        return [stream.request_id for stream in gone]

    def fail(self, streams: Sequence[Stream], error: Exception) -> None:
        """These cannot be brought to their end."""
        for stream in streams:
            if stream.request_id in self.open:
                self._close(stream, Finish.ERROR)
                stream.fail(error)

    def _close(self, stream: Stream, reason: Finish) -> None:
        del self.open[stream.request_id]
        self._begun(stream)
        self.ended[reason.value] += 1
        self.ends.add()

    def _begun(self, stream: Stream) -> None:
        self.waiting_tokens -= self._waiting.pop(stream.request_id, 0)
