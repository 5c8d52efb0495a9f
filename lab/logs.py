"""Decision logs (``docs/record.md``) as a source: of steps that a cost model is fitted to, and of arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from engine.core.record.lines import Add, AnyLine, Commit, Fail, Plan
from engine.core.record.pages import digests_of
from engine.core.record.reading import DecisionLog, read
from engine.lab.arrivals import Piece, seed_of
from engine.lab.cost import Fitted
from engine.lab.fitting import Measured, fit
from engine.lab.traces import Line, Trace
from engine.lab.work import StepWork, work_of

PAUSE = 0.002  # seconds: a longer one between two steps was no part of either


def steps_of(log: DecisionLog) -> list[Measured]:
    """The work of each step and the seconds from its plan to the next (or to its commit, where a pause follows).

    In overlap mode: the seconds for which it was computed. Steps that verify drafts are left out, and so are those that
    were dropped or failed.
    """
    overlap = bool(log.header.config.get("overlap"))
    return list(_overlapped(log.lines) if overlap else _in_turns(log.lines))


def fit_log(paths: Sequence[Path]) -> Fitted:
    """A cost model from decision logs of engines of one kind. Raises ``ConfigError``, ``NotALog``."""
    logs = [read(path) for path in paths]
    config = logs[0].header.config
    about = {"model": config["model"]["name"], "overlap": bool(config.get("overlap")), "limits": config["limits"]}
    return fit([step for log in logs for step in steps_of(log)], about)


def _in_turns(lines: Iterable[AnyLine]) -> Iterator[Measured]:
    works = _Works()
    last: tuple[StepWork, float, float] | None = None  # work, when it was planned, when it was committed
    for line in lines:
        if isinstance(line, Plan) and last is not None:
            work, began, done = last
            yield Measured(work, (line.t if line.t - done < PAUSE else done) - began)
            last = None
        works.see(line)
        if isinstance(line, Commit) and (known := works.done(line)) is not None:
            last = known[0], known[1].t, line.t + line.s
    if last is not None:
        yield Measured(last[0], last[2] - last[1])


def _overlapped(lines: Iterable[AnyLine]) -> Iterator[Measured]:
    works, before = _Works(), 0.0
    for line in lines:
        works.see(line)
        if isinstance(line, Commit):
            known = works.done(line)
            if known is not None:
                yield Measured(known[0], line.t - max(known[1].t + known[1].s, before))
            before = line.t


class _Works:
    """Follows where each request is, and so what each plan computes."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._open: dict[int, tuple[StepWork, Plan]] = {}

    def see(self, line: AnyLine) -> None:
        """The next line. Mutates."""
        if isinstance(line, Add) and line.before is not None:
            self._at[line.n] = line.before[2]
        elif isinstance(line, Fail):
            self._open.clear()
        elif isinstance(line, Plan) and line.rows:
            work = work_of(line.begin(self._at), line.each, len(line.rows) - len(line.partial))
            if not line.drafts:
                self._open[line.step] = work, line

    def done(self, line: Commit) -> tuple[StepWork, Plan] | None:
        """What a commit's plan computed, if all of it counts. Mutates."""
        known = self._open.pop(line.step, None)
        if line.tokens is not None and known is not None:
            return None
        return None if line.errors else known


class Log(Trace):
    """A decision log of ours: times, lengths, priorities, and which prompts begin alike, to a group of tokens.

    An answer is as long as it was. What it said is not in prompts that follow it, as in ``mooncake``.
    """

    name: ClassVar[str] = "log"

    def lines(self, seed: int) -> Iterator[Line]:
        """Requests in order of arrival, but those that the log does not see the end of."""
        log = read(Path(self.path))
        group = log.header.group
        for n, add in sorted(log.adds.items()):
            end = log.ends.get(n)
            if end is None:
                continue
            digests = digests_of(add.pages)
            pieces = [Piece(seed_of(seed, "group", digest), group) for digest in digests]
            rest = add.prompt - group * len(digests)
            if rest > 0:
                pieces.append(Piece(seed_of(seed, "rest", n), rest))
            yield Line(
                add.t if add.arrival is None else add.arrival, tuple(pieces), end.output, priority=add.priority,
                deadline=add.deadline, tenant=str(add.metadata.get("tenant", "")),
            )  # fmt: skip
