"""The lines of a decision log: JSON objects, one a line, told apart by ``e``. docs/record.md describes them.

Fields that have their default are left out. Requests are named by ``n``, their number in order of arrival; times are
seconds on the engine's clock, durations (``s``) seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

FORMAT = "sixhooks-record-1"


class Line(msgspec.Struct, tag_field="e", omit_defaults=True):
    """Base of all lines."""


class Log(Line, tag="log", kw_only=True):
    """The first line of each file.

    Attributes:
        id: names the log; files of one log share it.
        part: which file of the log it is, from 0 on.
        began: when the log began, in seconds since 1970. ``time``: the same moment on the engine's clock.
        whole: it begins with the engine: nothing had been computed or cached. Else it cannot be decided anew exactly.
        inexact: why it cannot be decided anew exactly, although it is whole; empty: it can.
        group: tokens that one digest of ``pages`` stands for.
        version: of the engine.
        config: limits, model, plugins by role with their options, ``overlap``, ``eos_ids``.
    """

    format: str
    id: str
    part: int = 0
    began: float
    time: float
    whole: bool
    inexact: str = ""
    group: int
    version: str
    config: dict[str, Any]


class Add(Line, tag="add", kw_only=True):
    """A request came. Without its tokens: ``pages`` are digests of their groups, chained and keyed.

    Attributes:
        id: its name in the engine.
        t: when it was added. ``arrival``: when it came, if that is another time.
        prompt: tokens of its prompt.
        pages: a digest for each whole group of the prompt, in base64; see ``core.record.pages``.
        params: sampling parameters that matter to scheduling, where they are not the defaults.
        salt: a keyed digest of its salt. ``adapter``: its name.
        pooling: how its vector is made, of one that yields no tokens. ``ttl``: ``cache_ttl``.
        deadline: seconds from its arrival.
        metadata: numbers as they are, text as a keyed digest unless it is a label that policies need.
        parked: what it waits for before it joins the queue.
        before: it came before the log begins: (state, tokens of output, tokens computed) as of then; an empty state:
            that is no longer remembered.
    """

    n: int
    id: str
    t: float
    arrival: float | None = None
    prompt: int
    pages: str = ""
    params: dict[str, Any] = {}
    priority: int = 0
    salt: str = ""
    adapter: str = ""
    read: bool = True
    write: bool = True
    pooling: Literal["", "last", "mean"] = ""
    ttl: float | None = None
    deadline: float | None = None
    metadata: dict[str, Any] = {}
    parked: list[str] = []
    before: tuple[str, int, int] | None = None


class Ready(Line, tag="ready"):
    """What a parked request waited for is there."""

    n: int
    what: str
    t: float


class Abort(Line, tag="abort"):
    """A request was ended from outside: by its client, a stop string (``stop``), its deadline (``timeout``)."""

    n: int
    t: float
    finish: str
    detail: str = ""


class Plan(Line, tag="plan"):
    """A step was planned.

    Attributes:
        t: when planning began; the engine's clock stood still until it ended, ``s`` seconds later.
        rows: requests of the batch in order. ``None``: all but ``step``, ``t``, ``s``, ``evicted`` and ``available`` is
            as in the plan before, and nobody was admitted or preempted.
        counts: tokens that each row computes; a number: the same for all.
        partial: rows (by their place) that end before the last known token, so that they yield none.
        admitted: (request, where its row begins: tokens found in the cache) of those that started, in order.
        preempted: those that gave up their pages, in order.
        evicted: pages evicted.
        waits: (request, why, words) of those that were looked at and got nothing.
        rest: why all others waited.
        cuts: (request, why) of rows that compute less than they owe.
        drafts: (request, count) of rows that verify drafts.
        queue: length of the queue after it, then its first few requests; empty: nobody waits.
        parked: requests that are not ready.
        available: free and evictable pages after it.
        mode: the scheduler's word for the batch.
    """

    step: int
    t: float
    s: float = 0.0
    rows: list[int] | None = None
    counts: int | list[int] = 1
    partial: list[int] = []
    admitted: list[tuple[int, int]] = []
    preempted: list[int] = []
    evicted: int = 0
    waits: list[tuple[int, str, str]] = []
    rest: str = "not_asked"
    cuts: list[tuple[int, str]] = []
    drafts: list[tuple[int, int]] = []
    queue: list[int] = []
    parked: int = 0
    available: int = 0
    mode: str = "mixed"

    @property
    def each(self) -> list[int]:
        """``counts``, one number a row."""
        return [self.counts] * len(self.rows or ()) if isinstance(self.counts, int) else self.counts

    def begin(self, places: dict[int, int]) -> list[int]:
        """Where each row begins. ``places`` says how many tokens of each request are computed: before the plan when
        this is called, and after it when it returns. Mutates ``places``."""
        for n in self.preempted:
            places.pop(n, None)
        places.update(self.admitted)
        rows = self.rows or []
        starts = [places.get(n, 0) for n in rows]
        places.update((n, start + count) for n, start, count in zip(rows, starts, self.each, strict=True))
        return starts


class Commit(Line, tag="commit"):
    """The outcome of a step was applied.

    Attributes:
        t: when the outcome was there; applying it took ``s``.
        tokens: how many each row yielded; ``None``: one each, those in ``partial`` none.
        finished: (request, how) of those that it ended.
        dropped: rows whose result came too late.
        errors: rows that failed alone.
        proposals: (row, drafts) that the executor proposed for the next step.
    """

    step: int
    t: float
    s: float = 0.0
    tokens: list[int] | None = None
    finished: list[tuple[int, str]] = []
    dropped: list[int] = []
    errors: list[int] = []
    proposals: list[tuple[int, int]] = []


class Run(Line, tag="run"):
    """Several steps in a row that decided the same as the plan before them, each committed with one token a row.

    Attributes:
        step: the first of them.
        lag: 0: each is committed before the next is planned. 1 (overlap): after it.
        idle: after each of them nothing was left to plan, and the scheduler was told so.
        t, s: of the plans. ``ct``, ``cs``: of the commits.
        available, evicted: of the plans.
    """

    step: int
    t: Sequence[float]
    s: Sequence[float]
    ct: Sequence[float]
    cs: Sequence[float]
    available: Sequence[int]
    evicted: Sequence[int] = ()
    lag: int = 0
    idle: bool = False


class Fail(Line, tag="fail"):
    """The oldest step in flight, and all after it, failed."""

    step: int
    t: float


class Expire(Line, tag="expire"):
    """What was cached for a time that is over is not found from now on. Only where some request has had a ``ttl``."""

    t: float


class Idle(Line, tag="idle"):
    """Nothing was left to plan, and the scheduler was told so."""


class Weights(Line, tag="weights"):
    """The model has other weights from here on."""

    t: float
    fingerprint: str


class Flush(Line, tag="flush"):
    """The prefix cache was told to forget everything."""

    t: float


class End(Line, tag="end"):
    """A request has ended; ``finish`` empty: the log ends, and the request has not.

    Attributes:
        output: tokens of output.
        pages: digests of the groups behind those of its prompt, up to its last token.
        started: when it was first admitted. ``cached``: tokens that the cache gave it then.
        computed: tokens whose KV was there at the end.
    """

    n: int
    t: float
    finish: str = ""
    output: int = 0
    pages: str = ""
    started: float | None = None
    cached: int = 0
    preemptions: int = 0
    computed: int = 0


class Gap(Line, tag="gap"):
    """Something is missing here."""

    lines: int
    why: str = "the disk was too slow"


AnyLine = Log | Add | Ready | Abort | Plan | Commit | Run | Fail | Expire | Idle | Weights | Flush | End | Gap

_encoder = msgspec.json.Encoder(enc_hook=str)
_decoder = msgspec.json.Decoder(AnyLine)


def encode(line: Line) -> bytes:
    """One line, without its end. Text that is no Unicode is escaped: policies may say anything."""
    try:
        return _encoder.encode(line)
    except UnicodeEncodeError:
        return _encoder.encode(_speakable(msgspec.to_builtins(line, enc_hook=str)))


def decode(data: bytes | str) -> AnyLine:
    """The line. Raises ``msgspec.DecodeError``."""
    return _decoder.decode(data)


def _speakable(value: Any) -> Any:
    """Plain values without lone surrogates."""
    if isinstance(value, dict):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_speakable(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
