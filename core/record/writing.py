"""Decision logs as they are written: to one file at once, or to files that follow each other as lines come."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from msgspec.structs import replace

from engine.core.record.lines import Gap, Log, encode
from engine.core.record.notes import Begin, Finis
from engine.core.record.pages import Veil
from engine.core.record.recorder import Entry
from engine.core.record.ring import Kept

log = logging.getLogger(__name__)

MOST_BEHIND = 100_000  # lines that may wait for the disk
CLOSE_SECONDS = 10.0
BEFORE = ("", 0, 0)  # of requests whose coming is no longer remembered, and neither how far they had got


def line_of(entry: Entry, veil: Veil) -> bytes:
    """The line of an entry, with digests instead of tokens, and its end."""
    return (entry if isinstance(entry, bytes) else encode(entry.line(veil))) + b"\n"


def write_kept(path: Path, header: Log, kept: Kept, ends: Iterable[Finis], veil: Veil) -> int:
    """Write what a ring holds as one log, to a new file or over an old one. Returns its bytes.

    Takes about a microsecond for each digest, so it is for a thread of its own.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        file.write(line_of(encode(replace(header, whole=header.whole and not kept.dropped)), veil))
        for note in kept.early:
            add = Begin(note).line(veil)
            file.write(line_of(encode(replace(add, before=add.before or BEFORE)), veil))
        for entry in (*kept.entries, *ends):
            file.write(line_of(entry, veil))
        return file.tell()


class Files:
    """A sink that writes to files ``ID.0000.jsonl``, ``ID.0001.jsonl``, … in a folder, in a thread of its own.

    Where the disk does not keep up, lines are left out, and a ``gap`` says how many. Where it fails, writing ends: the
    engine goes on.

    Args:
        folder: where they lie; made if it is not there.
        header: of the log; each file has it, with its number.
        veil: hides tokens.
        most: bytes of a file after which the next begins.
        keep: files that are kept; the oldest go.

    Raises:
        OSError: the first file cannot be made.
    """

    def __init__(self, folder: Path, header: Log, veil: Veil, *, most: int, keep: int) -> None:
        self._folder, self._header, self._veil, self._most, self._keep = folder, header, veil, most, keep
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._left_out = 0
        self._part = -1
        self.error: str | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._next()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._folder / f"{self._header.id}.{self._part:04d}.jsonl"

    def put(self, entry: Entry) -> None:
        """The next line. Mutates."""
        if self.error is not None:
            return
        if self._queue.qsize() >= MOST_BEHIND:
            self._left_out += 1
            return
        if self._left_out:
            self._queue.put(encode(Gap(self._left_out)))
            self._left_out = 0
        self._queue.put(entry)

    def end(self) -> None:
        """There are no more lines; what is left is still written. Mutates. Idempotent."""
        if self._left_out:
            self._queue.put(encode(Gap(self._left_out)))
            self._left_out = 0
        self._queue.put(None)

    def close(self) -> None:
        """Wait until what is left is written, for some seconds at most. Idempotent."""
        self.end()
        self._thread.join(CLOSE_SECONDS)

    # ---- in the thread

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._file.write(line_of(entry, self._veil))
                if self._queue.empty():
                    self._file.flush()
                if self._file.tell() >= self._most:
                    self._file.close()
                    self._file = self._next()
        except OSError as error:
            self.error = f"{self.path}: {error.strerror or error}"
            log.error("the decision log ends here: %s", self.error)
        finally:
            self._file.close()

    def _next(self) -> BinaryIO:
        """Begin the next file, and let the oldest go."""
        self._part += 1
        file = self.path.open("xb")
        file.write(line_of(encode(replace(self._header, part=self._part)), self._veil))
        file.flush()
        if self._part >= self._keep:
            (self._folder / f"{self._header.id}.{self._part - self._keep:04d}.jsonl").unlink(missing_ok=True)
        return file
