"""A frontend in a process of its own, around a real engine: started, looked into, told to stop.

The child serves (``main``); the parent asks through a pipe what the engine's books say, where the child listens, and
what was left when ``serve`` returned.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.protocols import Frontend
from engine.testing.guard import Violation

START_SECONDS = 120.0
POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0  # for threads that are about to end when serve returns
PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (40,), (7, 8, 9, 10, 11))
TOKENS = 12


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
        expected: text of each of ``PROMPTS``, of ``TOKENS`` tokens, by the engine itself.
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
        code = f"import sys; sys.path[:] = {job['path']!r}; from engine.testing.serving import main; main()"
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


# ---- in the child


def main() -> None:
    """Serve as told on standard input. Never returns."""
    commands, events = map(int, sys.argv[1:3])
    os.set_blocking(events, True)
    _Child(json.load(sys.stdin), commands, events).run()
    os._exit(0)  # what the frontend has left would keep the process alive


class _Child:
    def __init__(self, job: Mapping[str, Any], commands: int, events: int) -> None:
        self._job, self._commands, self._events = job, commands, events

    def run(self) -> None:
        from engine.core.config import EngineConfig, Selection
        from engine.core.registry import Found, build
        from engine.core.serve.client import AsyncEngine

        job = self._job
        cls = _class(job["module"], job["file"], job["name"])
        found = Found("frontend", cls, "local code", "")
        frontend = build(found, Selection(name=cls.name, options=job["options"]))
        assert isinstance(frontend, Frontend)
        self._engine = AsyncEngine.launch(EngineConfig.model_validate(job["engine"]), in_process=job["in_process"])
        self._emit(kind="ready", expected=_expected(self._engine))
        self._threads, self._sockets = set(threading.enumerate()), _sockets()
        threading.Thread(target=self._obey, name="suite-control", daemon=True).start()
        self._emit(kind="end", **self._serve(frontend))
        self._engine.shutdown()

    def _serve(self, frontend: Frontend) -> dict[str, Any]:
        from engine.core.errors import EngineError

        code, refused, words = None, False, ""
        try:
            code = frontend.serve(self._engine, host="127.0.0.1", port=self._job["port"], api_key=self._job["api_key"])
            words = f"it returned {code!r}"
        except EngineError as error:
            refused, words = True, f"{type(error).__name__}: {error}"
        except BaseException as error:
            words = f"it raised {type(error).__name__}: {error}"
        frontend.close()
        return {"code": code, "refused": refused, "words": words, "threads": self._left(), "sockets": self._open()}

    def _left(self) -> list[str]:
        """Threads that are there and were not. Those about to end may do so."""
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            names = [t.name for t in set(threading.enumerate()) - self._threads if t.name != "suite-control"]
            if not names or time.monotonic() > deadline:
                return sorted(names)
            time.sleep(POLL_SECONDS)

    def _open(self) -> list[str]:
        """Sockets that are open and were not."""
        return [str(_name(fd)) for fd in sorted(_sockets() - self._sockets)]

    def _obey(self) -> None:
        told, rest = False, b""
        while True:
            if not told and (address := self._listens()) is not None:
                told = True
                self._emit(kind="listening", address=address)
            if not select.select([self._commands], [], [], 1.0 if told else POLL_SECONDS)[0]:
                continue
            part = os.read(self._commands, 1024)
            if not part:  # whoever started us is gone
                os.killpg(0, signal.SIGKILL)
            *words, rest = (rest + part).split(b"\n")
            for word in words:
                self._answer(word.decode())

    def _answer(self, word: str) -> None:
        if word == "kill":
            assert self._engine.pid is not None
            os.kill(self._engine.pid, signal.SIGKILL)
            return
        ledger = self._engine.ledger
        self._emit(kind="books", books={"accepted": ledger.accepted, "open": len(ledger), "ended": dict(ledger.ended)})

    def _listens(self) -> Sequence[Any] | None:
        for fd in _sockets() - self._sockets:
            with _dup(fd) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.family == socket.AF_INET:
                    return list(sock.getsockname()[:2])
        return None

    def _emit(self, **event: Any) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")


def _class(module: str, file: str | None, name: str) -> Any:
    """The class, imported by its module's name, or from its file where that is none that can be imported."""
    try:
        value: Any = importlib.import_module(module)
        if file is not None and Path(getattr(value, "__file__", "")) != Path(file):
            raise ImportError(f"another module is named {module}")
    except ImportError:
        if file is None:
            raise
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        value = importlib.util.module_from_spec(spec)
        sys.modules[module] = value
        spec.loader.exec_module(value)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _expected(engine: Any) -> list[str]:
    import asyncio

    from engine.core.request import SamplingParams

    async def ask() -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        return [(await engine.complete(list(prompt), params)).text for prompt in PROMPTS]

    return asyncio.run(ask())


def _sockets() -> set[int]:
    found = set()
    for entry in os.listdir("/dev/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                found.add(int(entry))
        except OSError:
            continue  # closed since
    return found


def _dup(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))


def _name(fd: int) -> Any:
    try:
        with _dup(fd) as sock:
            return sock.getsockname() or "a socket without a name"
    except OSError:
        return "a socket"
