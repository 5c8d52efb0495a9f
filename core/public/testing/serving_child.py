"""The other side of ``engine.testing.serving``: the process in which a frontend serves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.protocols import Frontend

POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0  # for threads that are about to end when serve returns
PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (40,), (7, 8, 9, 10, 11))
TOKENS = 12


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
