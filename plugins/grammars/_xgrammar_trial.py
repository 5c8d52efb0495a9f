"""Grammars are tried in a process of their own before the engine compiles them: C++ that never ends, takes all memory
or ends its process does so there.

One process has the library and the vocabulary and forks a child for each try, which has limits on time, memory and
stack. What passed is compiled again in the engine: to write one down and read it takes several times as long.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.core.errors import one_line
from engine.core.grammar import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, TokenizerInfo

STACK = 32 << 20  # bytes: half of what the engine's own threads for this have
STACK_A_BYTE = 512
ROOM = 1 << 30  # bytes of memory that a try may take
START_SECONDS = 120.0  # importing takes seconds, on a busy machine tens of them
GRACE = 2.0  # seconds beyond a try's own clock


class Recipe(msgspec.Struct, frozen=True):
    """All that shapes what is compiled. ``json``, ``regex``, ``ebnf``, or ``lark`` with its schemas."""

    kind: str
    text: str
    schemas: tuple[str, ...] = ()
    whitespace: int = 32

    @property
    def size(self) -> int:
        """Characters of it."""
        return len(self.text) + sum(map(len, self.schemas))


class Words(msgspec.Struct, frozen=True):
    """A vocabulary on its way."""

    tokens: list[bytes]
    size: int
    ends: list[int]


class Try(msgspec.Struct, frozen=True):
    """One recipe, and the seconds that it may take."""

    recipe: Recipe
    seconds: float


class TrialLost(Exception):
    """The process that tries grammars is not there."""


def tokenizer_info(words: Words) -> TokenizerInfo:
    """The vocabulary as the library wants it."""
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo(words.tokens, VocabType.RAW, vocab_size=words.size, stop_token_ids=words.ends)


def words_of(vocabulary: Vocabulary) -> Words:
    """Tokens that are marks or unknown have no text: the library never allows such."""
    marks = vocabulary.special_ids | vocabulary.eos_ids
    tokens = [b"" if token in marks else data for token, data in enumerate(vocabulary.tokens)]
    return Words([*tokens, *[b""] * (vocabulary.size - len(tokens))], vocabulary.size, sorted(vocabulary.eos_ids))


def compiled(recipe: Recipe, info: TokenizerInfo) -> CompiledGrammar:
    """Compile, in one thread and without a memory of earlier ones. Raises what the library raises."""
    from xgrammar import GrammarCompiler

    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    blanks = {"strict_mode": False, "any_whitespace": bool(recipe.whitespace), "separators": (",", ":")}
    if recipe.whitespace:
        blanks["max_whitespace_cnt"] = recipe.whitespace
    if recipe.kind == "json":
        return compiler.compile_json_schema(recipe.text, **blanks)
    if recipe.kind == "regex":
        return compiler.compile_regex(recipe.text)
    if recipe.kind == "ebnf":
        return compiler.compile_grammar(recipe.text)
    from xgrammar import Grammar

    inner = {f"json_{n}": Grammar.from_json_schema(schema, **blanks) for n, schema in enumerate(recipe.schemas)}
    return compiler.compile_lark(recipe.text, named_grammars=inner)


class Trial:
    """The engine's end. Thread-safe.

    Args:
        words: the vocabulary.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Begin the process; returns before it is ready."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "engine.plugins.grammars._xgrammar_trial", str(theirs.fileno())]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        ours.settimeout(START_SECONDS)
        self._control = ours

    def wait(self) -> None:
        """Give it the vocabulary, and wait until it is ready. Raises ``TrialLost``."""
        assert self._control is not None
        data = msgspec.msgpack.encode(self._words)
        try:
            self._control.sendall(len(data).to_bytes(8, "big") + data)
            if self._control.recv(1) != b"!":
                raise TrialLost("the process that tries grammars ended before it was ready")
        except OSError as error:
            raise TrialLost(f"the process that tries grammars did not become ready: {one_line(error)}") from error

    def run(self, recipe: Recipe, seconds: float) -> str | None:
        """Try one, and say what is wrong with it (``None``: nothing). Raises ``TrialLost``; another process begins."""
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                self._send(theirs)
            mine.settimeout(seconds + GRACE)
            began = time.monotonic()
            try:
                mine.sendall(msgspec.msgpack.encode(Try(recipe, seconds)))
                mine.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: mine.recv(1 << 16), b""))
            except OSError:  # it took longer than its own clock let it, or is gone
                answer = b""
        if answer:
            return msgspec.msgpack.decode(answer, type=str | None)
        if time.monotonic() - began > 0.8 * seconds:
            return f"took more than {seconds:g} s to compile (compile_seconds)"
        return "cannot be compiled: the library ended its process"

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True  # without the lock: whoever has it may wait for a process that is still importing
        self._end()

    def _send(self, theirs: socket.socket) -> None:
        with self._lock:
            if self._closed or self._control is None:
                raise TrialLost("the process that tries grammars has been ended")
            try:
                socket.send_fds(self._control, [b"?"], [theirs.fileno()])
            except OSError as error:
                self._end()
                self.start()
                threading.Thread(target=self._again, name="grammar-trial", daemon=True).start()
                raise TrialLost("the process that tries grammars has ended; another begins") from error

    def _again(self) -> None:
        with self._lock, contextlib.suppress(TrialLost):
            if not self._closed:
                self.wait()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # it keeps nothing; a child that is at it ends by its own clock
            self._process.wait()
        if self._control is not None:
            self._control.close()


# ---- in the process


def main(number: int) -> None:
    """Fork a child for each socket that comes; end when nobody can send any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=number) as control:
        info = tokenizer_info(msgspec.msgpack.decode(_read(control), type=Words))
        control.sendall(b"!")
        while True:
            data, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            if os.fork() == 0:
                control.close()
                _child(socket.socket(fileno=sockets[0]), info)
            os.close(sockets[0])


def _read(control: socket.socket) -> bytes:
    size, data = -1, b""
    while size < 0 or len(data) < size:
        more = control.recv(1 << 20)
        if not more:
            os._exit(0)
        data += more
        if size < 0 and len(data) >= 8:
            size, data = int.from_bytes(data[:8], "big"), data[8:]
    return data


def _child(line: socket.socket, info: TokenizerInfo) -> None:
    try:
        data = b"".join(iter(lambda: line.recv(1 << 16), b""))
        asked = msgspec.msgpack.decode(data, type=Try)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the child
        signal.setitimer(signal.ITIMER_REAL, asked.seconds)
        pages = Path("/proc/self/statm")
        if pages.exists():
            room = int(pages.read_text().split()[0]) * resource.getpagesize() + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        threading.stack_size(max(STACK, STACK_A_BYTE * asked.recipe.size))
        thread = threading.Thread(target=_try, args=(line, asked.recipe, info))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _try(line: socket.socket, recipe: Recipe, info: TokenizerInfo) -> None:
    words: str | None = None
    try:
        compiled(recipe, info)
    except Exception as error:
        words = f"cannot be compiled: {told(error)}"
    line.sendall(msgspec.msgpack.encode(words))


def told(error: BaseException) -> str:
    """The library's words, without where in its sources they are."""
    words = " ".join(str(error).split())
    head, mark, rest = words.partition(".cc:")
    if mark and head.startswith("["):
        words = rest.partition(": ")[2]
    return words


if __name__ == "__main__":
    main(int(sys.argv[1]))
