"""Printing that never ends a server: what a full disk or a closed pipe does not take is dropped, and counted."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Lossy:
    """A text stream in front of another one. Whatever the other cannot write is lost; the next text that it takes is
    preceded by how much was lost. Everything else is the other's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        """Write if possible. Returns the length of the text, whatever became of it."""
        try:
            if self.lost and text.strip():
                lost, self.lost = self.lost, 0
                self._stream.write(f"({lost} pieces of output before this could not be written)\n")
                self._stream.flush()
            self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += 1
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self.lost += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_printing() -> None:
    """From now on standard output and error never raise. Mutates ``sys``. Idempotent."""
    if not isinstance(sys.stdout, Lossy):
        sys.stdout = Lossy(sys.stdout)
    if not isinstance(sys.stderr, Lossy):
        sys.stderr = Lossy(sys.stderr)
