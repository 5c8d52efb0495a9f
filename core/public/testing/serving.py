"""A frontend in a process of its own, around a real engine: started, looked into, told to stop.

The child (``engine.testing.serving_child``) serves; the parent asks through a pipe what the engine's books say, where
the child listens, and what was left when ``serve`` returned.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.testing.guard import Violation
from engine.testing.serving_child import POLL_SECONDS

START_SECONDS = 120.0


class Books(NamedTuple):
    """What the engine has on its books: requests accepted, open, and ended by reason."""

    accepted: int
    open: int
    ended: Mapping[str, int]


class Served:
    """A frontend that serves in a process of its own. A context manager.

    Args:
        cls: the frontend's class; its module is imported again over there, from its file if need be.
        options: its options, as a configuration has them.
        engine: fields of the engine's configuration.
        api_key, port: as given to ``serve``.
        in_process: the engine is a thread beside it; else ``kill_engine`` works.

    Attributes:
        address: (host, port) where it listens.
        expected: text of each of the suite's prompts, by the engine itself.
    """

    def __init__(
        self, cls: type, options: Mapping[str, Any], *, engine: Mapping[str, Any] | None = None,
        api_key: str | None = None, port: int = 0, in_process: bool = True, patience: float = 30.0,
    ) -> None:  # fmt: skip
        self.patience = patience
        module = sys.modules[cls.__module__]
        job = {
            "path": [entry or os.getcwd() for entry in sys.path], "module": cls.__module__, "name": cls.__qualname__,
            "file": getattr(module, "__file__", None), "options": dict(options), "api_key": api_key, "port": port,
            "engine": {"executor": {"name": "sim", "step_ms": 2}, **(engine or {})}, "in_process": in_process,
        }  # fmt: skip
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        code = f"import sys; sys.path[:] = {job['path']!r}; from engine.testing.serving_child import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(commands), str(events)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, pass_fds=(commands, events), start_new_session=True,
        )  # fmt: skip
        os.close(commands)
        os.close(events)
        self._buffer = b""
        self._errors: list[bytes] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.address: tuple[str, int] = ("", 0)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode())
        self.process.stdin.close()
        try:
            self.expected: list[str] = self._event("ready", START_SECONDS)["expected"]
        except BaseException:
            self.close()
            raise

    def listening(self) -> Served:
        """Wait until it listens. Raises ``Violation`` where it does not."""
        host, port = self._event("listening", self.patience)["address"]
        self.address = host, port
        return self

    def books(self) -> Books:
        """The engine's books now."""
        self._tell("books")
        return Books(**self._event("books", self.patience)["books"])

    def wait_for(self, what: str, holds: Any) -> Books:
        """The books once ``holds(books)``. Raises ``Violation`` where that takes too long."""
        deadline = time.monotonic() + self.patience
        while not holds(books := self.books()):
            if time.monotonic() > deadline:
                raise Violation(f"{what}; after {self.patience:g} s the engine's books say {books}")
            time.sleep(POLL_SECONDS)
        return books

    def kill_engine(self) -> None:
        """End the engine's process, as a crash would."""
        self._tell("kill")

    def stop(self, number: int = signal.SIGTERM) -> dict[str, Any]:
        """Send a signal; what ``serve`` came to: ``code``, ``threads`` and ``sockets`` left.

        Raises ``Violation`` where it does not end.
        """
        self.process.send_signal(number)
        return self.end(f"serve has not returned {self.patience:g} s after {signal.Signals(number).name}")

    def end(self, late: str = "serve has not ended") -> dict[str, Any]:
        """What ``serve`` came to, once it has. Raises ``Violation`` with the words of ``late``."""
        return self._event("end", self.patience, late)

    def close(self) -> None:
        """End the process and everything that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # where it has ended, what it started may be there still
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stderr):
            if stream is not None:
                stream.close()
        for end in (self._commands, self._events):
            os.close(end)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, word: str) -> None:
        try:
            os.write(self._commands, f"{word}\n".encode())
        except BrokenPipeError as error:
            raise Violation(f"the frontend's process has ended: {self._last_words()}") from error

    def _event(self, kind: str, seconds: float, late: str = "") -> dict[str, Any]:
        """The next event of this kind; ``end`` comes instead of whatever else was waited for."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                event: dict[str, Any] = json.loads(line)
                if event["kind"] == kind:
                    return event
                if event["kind"] == "end":
                    raise Violation(f"serve has ended before it was told to: {event['words']}")
            if not select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Violation(late or f"{seconds:g} s have passed, and the frontend is not {kind}")
            part = os.read(self._events, 65536)
            if not part:
                raise Violation(f"the frontend's process has ended: {self._last_words()}")
            self._buffer += part

    def _last_words(self) -> str:
        self.process.wait()
        self._reader.join()
        lines = b"".join(self._errors).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)
