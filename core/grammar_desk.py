"""Grammars are compiled beside the engine's thread: a request is parked on ``grammar`` until its own is there.

A compile that takes too long is given up, not waited for: threads cannot be stopped, so it goes on without anybody who
waits for it, in the place of which another begins. Where so many are lost, no other is begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.core.errors import EngineError, InvalidRequest, one_line
from engine.core.grammar import Grammar, Guide, Vocabulary
from engine.core.protocols import CompiledGrammar, GrammarCompiler, Matcher
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

log = logging.getLogger(__name__)

GRAMMAR = "grammar"  # what a request is parked on
REMEMBERED = 64  # outcomes kept for who asks next: it costs a matcher alone, and no thread is lost twice to a slow one
MOST_LOST = 4  # compiles that were given up and have not ended: with as many, none is begun
MOST_MATCHERS = 16  # that a job makes: what compiling may take is no limit for a crowd
STACK = 64 << 20  # bytes of a compiling thread's: libraries go deeper with every rule that refers to another
STACK_A_BYTE = 1024  # of a grammar
CLOSE_SECONDS = 5.0

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class Job:
    """One grammar being compiled, and who waits for it.

    Attributes:
        began: when, in seconds of ``time.monotonic``.
        matchers: for some of those who wait, all if they are few.
        error: why there is none; also that it was given up, while it is being compiled.
    """

    grammar: Grammar
    waiting: dict[Request, None] = field(default_factory=dict)
    began: float | None = None
    compiled: CompiledGrammar | None = None
    matchers: dict[Request, Matcher] = field(default_factory=dict)
    error: InvalidRequest | None = None


class GrammarDesk:
    """Has grammars compiled, and gives each request a ``Guide``. Called by the engine's thread only.

    Args:
        compiler: the plugin; ``None``: no request may have a grammar.
        vocabulary: the model's vocabulary, asked for once, by a compiling thread, when the first grammar comes.
        seconds: that one compile may take.
        threads: that compile at once.
    """

    def __init__(
        self,
        core: EngineCore,
        compiler: GrammarCompiler | None,
        vocabulary: Callable[[], Vocabulary] | None,
        *,
        seconds: float,
        threads: int,
    ) -> None:
        self._core, self._compiler, self._source = core, compiler, vocabulary
        self._seconds, self._threads = seconds, threads
        self._jobs: dict[Key, Job] = {}
        self._queue: deque[Job] = deque()
        self._done: deque[Job] = deque()  # filled by the threads
        self._working: dict[Job, threading.Thread] = {}
        self._lost: dict[Job, threading.Thread] = {}
        self._kept: OrderedDict[Key, CompiledGrammar | InvalidRequest] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._preparing = threading.Lock()
        self.compiled = 0

    def __len__(self) -> int:
        """Grammars that somebody waits for."""
        return len(self._jobs)

    def ask(self, request: Request) -> None:
        """Have the request's grammar compiled; it is parked until then. Mutates. Never waits."""
        grammar = request.params.grammar
        assert grammar is not None
        job = self._jobs.get(_key(grammar))
        if job is None:
            job = self._jobs[_key(grammar)] = Job(grammar)
            self._begin(job)
        job.waiting[request] = None

    def forget(self, request: Request) -> None:
        """The request ended. Mutates."""
        grammar = request.params.grammar
        if grammar is not None and (job := self._jobs.get(_key(grammar))) is not None:
            job.waiting.pop(request, None)

    def collect(self) -> None:
        """Hand on what was compiled, and give up what takes too long. Mutates. Called between two steps."""
        now = time.monotonic()
        while self._done:
            self._ended(self._done.popleft())
        for job in [job for job in self._working if job.began is not None and now - job.began > self._seconds]:
            self._give_up(job)
        while self._queue and len(self._working) < self._threads:
            self._run(self._queue.popleft())

    def close(self) -> None:
        """Nobody waits any more. Threads that compile end with what they are at; waits for them a while."""
        self._queue.clear()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in [*self._working.values(), *self._lost.values()]:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._jobs.clear()

    # ---- inside

    def _begin(self, job: Job) -> None:
        kept = self._kept.get(_key(job.grammar))
        if kept is not None:
            self._kept.move_to_end(_key(job.grammar))
            job.compiled, job.error = (None, kept) if isinstance(kept, InvalidRequest) else (kept, None)
        (self._queue if job.error is None else self._done).append(job)

    def _run(self, job: Job) -> None:
        if not job.waiting:  # all of them have left meanwhile
            del self._jobs[_key(job.grammar)]
            return
        if len(self._lost) >= MOST_LOST:
            words = f"{len(self._lost)} grammars that take too long keep the compiler busy: try again later"
            job.error = InvalidRequest(job.grammar.field, words, code="above_limit")
            self._finish(job)
            return
        thread = threading.Thread(target=self._compile, args=(job,), name="grammar", daemon=True)
        usual = threading.stack_size(max(STACK, STACK_A_BYTE * len(job.grammar.text)))
        try:
            thread.start()
        except RuntimeError as error:
            job.error = InvalidRequest(job.grammar.field, f"cannot be compiled now: {error}")
            self._finish(job)
        else:
            self._working[job] = thread
        finally:
            threading.stack_size(usual)

    def _ended(self, job: Job) -> None:
        self._working.pop(job, None)
        if self._lost.pop(job, None) is not None:
            self._kept.pop(_key(job.grammar), None)  # whoever asks again finds out whether the machine was only busy
            return
        outcome = job.error if job.compiled is None else job.compiled
        if outcome is not None:
            self._kept[_key(job.grammar)] = outcome
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        self._finish(job)

    def _give_up(self, job: Job) -> None:
        self._lost[job] = self._working.pop(job)
        words = f"took more than {self._seconds:g} s to compile (grammar_seconds)"
        job.error = InvalidRequest(job.grammar.field, words, code="above_limit")
        self._kept[_key(job.grammar)] = job.error
        self._finish(job)

    def _finish(self, job: Job) -> None:
        """Tell those who wait, and have matchers made for those who came too late for one. Mutates."""
        del self._jobs[_key(job.grammar)]
        left = Job(job.grammar, compiled=job.compiled)
        for request in job.waiting:
            if request.finished:
                continue
            if job.error is not None:
                self._core.refuse(request, _named(job.error, request))
            elif (matcher := job.matchers.get(request)) is None:
                left.waiting[request] = None
            else:
                assert self._vocabulary is not None
                request.guide = Guide(matcher, self._vocabulary)
                self._core.ready(request.id, GRAMMAR)
        if left.waiting:
            self._jobs[_key(job.grammar)] = left
            self._queue.append(left)

    # ---- in a compiling thread

    def _compile(self, job: Job) -> None:
        field = job.grammar.field
        try:
            vocabulary, compiler = self._prepared(field)
            job.began = time.monotonic()
            compiled, first = job.compiled, None
            if compiled is None:
                compiled = compiler.compile(job.grammar)
                first, mask = compiled.matcher(), np.zeros(vocabulary.words, np.int32)
                first.fill(mask)
                if not mask.any():
                    raise InvalidRequest(field, "no text satisfies this grammar")
            for request in list(job.waiting)[:MOST_MATCHERS]:
                job.matchers[request] = compiled.matcher() if first is None else first
                first = None
            if job.error is None and job.compiled is None:  # nobody has given it up
                job.compiled = compiled
                self.compiled += 1
        except InvalidRequest as error:
            job.error = job.error or error
        except BaseException as error:  # whatever a library raises is one request's trouble, its panics included
            log.exception("a grammar of kind %s could not be compiled", job.grammar.kind)
            job.error = job.error or InvalidRequest(field, f"cannot be compiled: {one_line(error)}")
        finally:
            self._done.append(job)

    def _prepared(self, field: str) -> tuple[Vocabulary, GrammarCompiler]:
        assert self._compiler is not None
        with self._preparing:
            if self._vocabulary is None:
                if self._source is None:
                    raise InvalidRequest(field, "the served model has no tokenizer: no grammar can be followed")
                try:
                    vocabulary = self._source()
                except EngineError as error:
                    raise InvalidRequest(field, f"no grammar can be followed: {error}") from error
                if not vocabulary.eos_ids:
                    raise InvalidRequest(field, "the model has no end-of-sequence token: no grammar could ever end")
                self._compiler.prepare(vocabulary)
                self._vocabulary = vocabulary
        return self._vocabulary, self._compiler


def _key(grammar: Grammar) -> Key:
    """A grammar without the field that it came from, which is for errors."""
    return grammar.kind, grammar.text


def _named(error: InvalidRequest, request: Request) -> InvalidRequest:
    """The same fault, at the field that this request has named."""
    grammar = request.params.grammar
    field = error.field if grammar is None else grammar.field
    return InvalidRequest(field, error.message, code=error.code)
