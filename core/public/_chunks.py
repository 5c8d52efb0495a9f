"""What ``LLM`` hands out while it works: the pieces of one completion, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from engine.core.outputs import Chunk, Completion
from engine.core.serve.streams import Stream


class ChunkStream(Iterator[Chunk]):
    """The pieces of one completion, as they are asked for. A context manager; ``close`` ends the request."""

    def __init__(self, stream: Stream, step: Callable[[], object], abort: Callable[[Sequence[Stream]], None]) -> None:
        self._stream, self._step, self._abort = stream, step, abort
        self._closed = False

    def __next__(self) -> Chunk:
        try:
            while not (self._closed or self._stream.exhausted):
                chunk = self._stream.take()
                if chunk is not None:
                    return chunk
                if not self._stream.done:
                    self._step()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    @property
    def request_id(self) -> str:
        """The request's name in the core, e.g. for ``llm.core.why``."""
        return self._stream.request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended. The last piece may still be there to be taken."""
        return self._closed or self._stream.done

    def poll(self) -> Chunk | None:
        """What came since the last piece was taken, ``None`` if nothing did. Steps nothing: that is the caller's."""
        return None if self._closed else self._stream.take()

    def close(self) -> None:
        """End the request; no more pieces come. Idempotent."""
        self._closed = True
        self._abort([self._stream])

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Bar:
    """A progress bar over finished prompts."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True))
        self._task = self._progress.add_task("prompts", total=total)
        self._progress.start()

    def advance(self, completion: Completion) -> None:
        """One more prompt is done."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()
