"""A time limit for code that may never come back: it runs in a process of its own, and whoever waits has its stack."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryFile
from typing import IO, NamedTuple

FRAMES = 12  # of each thread: the innermost
STACK_SECONDS = 5.0
DONE = b"null\n"


class Place(NamedTuple):
    """What is being tried: of which plugin, under which rule, where, with which seed."""

    plugin: str
    rule: str
    where: str
    seed: int | None = None


class Stopped(NamedTuple):
    """What was tried when it had to be stopped, why, and the stack of every thread, the innermost calls first."""

    place: Place
    words: str
    stack: list[str]


def watched(limit: float, first: Place, tell: Callable[[Stopped], None]) -> Callable[[Place], None]:
    """From here on this program goes on in a child; this process waits for it, and ends as it does.

    Call what is returned whenever something new is tried. Where nothing new is tried for ``limit`` seconds, or the
    child ends otherwise than by its own end, ``tell`` is told, everything that the child started is ended, and the exit
    code is 1.

    Args:
        limit: seconds; 0: none, and nothing is forked. So it is where processes cannot be forked.
        first: what is tried until something else is.
        tell: called in the waiting process.
    """
    if not limit or not hasattr(os, "fork"):
        return lambda place: None
    reading, writing = os.pipe()
    stack = TemporaryFile()  # noqa: SIM115  # lives as long as the processes do
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(writing)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the child, too
        sys.exit(_wait(child, reading, stack, limit, first, tell))
    os.close(reading)
    os.setpgid(0, 0)
    atexit.register(os.write, writing, DONE)
    faulthandler.enable(file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    return lambda place: _say(writing, place)


def _say(writing: int, place: Place) -> None:
    os.write(writing, json.dumps(place).encode() + b"\n")


def _wait(
    child: int, reading: int, stack: IO[bytes], limit: float, place: Place, tell: Callable[[Stopped], None]
) -> int:
    rest, done = b"", False
    try:
        while select.select([reading], [], [], limit)[0]:
            part = os.read(reading, 65536)
            if not part:
                return _ended(child, stack, place, done, tell)
            *lines, rest = (rest + part).split(b"\n")
            for said in map(json.loads, lines):
                place, done = (Place(*said), False) if said else (place, True)
        os.kill(child, signal.SIGUSR1)
        frames = _frames(stack, STACK_SECONDS)
        tell(Stopped(place, f"it has not come back for {limit:g} s", frames))
        return 1
    finally:
        _end(child)


def _ended(child: int, stack: IO[bytes], place: Place, done: bool, tell: Callable[[Stopped], None]) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if done and code >= 0:
        return code
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"was ended by somebody, with exit code {code}"
    tell(Stopped(place, f"its process {how}", _frames(stack, 0)))
    return 1


def _end(child: int) -> None:
    """End the child and all that it started; nothing where it has ended by itself."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, PermissionError, ChildProcessError):
        pass


def _frames(stack: IO[bytes], seconds: float) -> list[str]:
    """What the child's fault handler has written, once it is complete: it writes thread by thread."""
    deadline, text = time.monotonic() + seconds, b""
    while True:
        stack.seek(0)
        now = stack.read()
        if (now and now == text) or time.monotonic() >= deadline:
            break
        text = now
        time.sleep(0.1)
    lines: list[str] = []
    shown = 0
    for line in now.decode(errors="replace").splitlines():
        frame = line.startswith("  ")
        shown = shown + 1 if frame else 0
        if line and shown <= FRAMES:
            lines.append(line.strip() if not frame else f"  {line.strip()}")
    return lines
