"""Decision logs as they are read: files into lines, runs of equal steps spelled out."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from engine.core.errors import ConfigError, EngineError
from engine.core.record.lines import FORMAT, Abort, Add, AnyLine, Commit, End, Gap, Idle, Log, Plan, Run, decode

MARK = b'{"e":"log"'  # how every file begins


class NotALog(EngineError):
    """A file is no decision log, or files do not belong together."""


@dataclass(slots=True)
class DecisionLog:
    """A log in memory.

    Attributes:
        header: of its first file.
        lines: all others in order, without ``Run``: the steps of a run are there as ``Plan`` and ``Commit``; every
            ``Plan`` has its rows, counts (a list) and partial.
        adds, ends: those of each request by its number. Numbers are in order of arrival.
        cut: why it is less than all that was recorded; empty: it is all.
    """

    header: Log
    lines: list[AnyLine]
    cut: str = ""
    adds: dict[int, Add] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adds = {line.n: line for line in self.lines if isinstance(line, Add)}
        self.ends = {line.n: line for line in self.lines if isinstance(line, End)}

    @property
    def inexact(self) -> str:
        """Why it cannot be decided anew exactly; empty: it can."""
        if not self.header.whole:
            return "it does not begin with the engine, so what was cached is not known"
        return self.header.inexact or self.cut

    @property
    def plans(self) -> list[Plan]:
        """Its steps."""
        return [line for line in self.lines if isinstance(line, Plan)]

    @property
    def aborts(self) -> dict[int, Abort]:
        """The first abort of each request by its number."""
        found: dict[int, Abort] = {}
        for line in self.lines:
            if isinstance(line, Abort):
                found.setdefault(line.n, line)
        return found


def is_log(path: Path) -> bool:
    """Whether a file (or a folder's first one) begins as logs do. Raises ``ConfigError`` where it cannot be read."""
    with _readable(path):
        files = files_of([path])
        if not files:
            return False
        with _opened(files[0]) as file:
            return file.read(len(MARK)) == MARK


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files that are meant: those in a folder by name, others as they are."""
    found: list[Path] = []
    for path in paths:
        found += sorted(each for each in path.iterdir() if ".jsonl" in each.suffixes) if path.is_dir() else [path]
    return found


def read(paths: Sequence[Path] | Path) -> DecisionLog:
    """Read a log: its file, its files in any order, or the folder that they lie in.

    Raises:
        NotALog: there is none, or they are not one.
        ConfigError: a file cannot be read.
    """
    given = [paths] if isinstance(paths, Path) else list(paths)
    with _readable(*given):
        return _read(files_of(given))


def _read(files: Sequence[Path]) -> DecisionLog:
    if not files:
        raise NotALog("there is no decision log")
    parts = sorted(((_header(path), path) for path in files), key=lambda part: part[0].part)
    first = parts[0][0]
    for number, (header, path) in enumerate(parts):
        if header.id != first.id:
            raise NotALog(f"{path}: belongs to log {header.id}, and {parts[0][1]} to log {first.id}")
        if header.part != first.part + number:
            raise NotALog(f"{path}: is part {header.part}, and part {first.part + number} is missing")
    lines: list[AnyLine] = []
    cut = "" if first.part == 0 else f"it begins with part {first.part}"
    for _, path in parts:
        found, broken = _lines(path)
        lines += found
        cut = cut or broken
    gap = next((line for line in lines if isinstance(line, Gap)), None)
    if gap is not None:
        cut = cut or f"something is missing in it: {gap.why}"
    return DecisionLog(first, list(spelled_out(lines)), cut)


def parse(data: bytes) -> DecisionLog:
    """A log that lies in memory. Raises ``NotALog``."""
    header, *rest = data.splitlines()
    log = _decoded(header, "the log")
    if not isinstance(log, Log):
        raise NotALog("the log does not begin with its header")
    return DecisionLog(log, list(spelled_out([_decoded(line, "the log") for line in rest])))


def spelled_out(lines: Iterable[AnyLine]) -> Iterator[AnyLine]:
    """Lines without runs and without abbreviated plans."""
    before = Plan(0, 0.0, rows=[], counts=[])
    for line in lines:
        if isinstance(line, Plan):
            before = _whole(line, before)
            yield before
        elif isinstance(line, Run):
            for each in _steps(line, before):
                if isinstance(each, Plan):
                    before = each
                yield each
        else:
            yield line


def _whole(plan: Plan, before: Plan) -> Plan:
    if plan.rows is None:
        return _again(before, plan.step, plan.t, plan.s, plan.available, plan.evicted)
    return msgspec.structs.replace(plan, counts=plan.each) if isinstance(plan.counts, int) else plan


def _again(before: Plan, step: int, t: float, s: float, available: int, evicted: int) -> Plan:
    return msgspec.structs.replace(
        before, step=step, t=t, s=s, available=available, evicted=evicted, admitted=[], preempted=[]
    )


def _steps(run: Run, before: Plan) -> Iterator[AnyLine]:
    evicted = run.evicted or [0] * len(run.t)
    figures = zip(run.t, run.s, run.available, evicted, run.ct, run.cs, strict=True)
    for step, (t, s, available, dropped, done, took) in enumerate(figures, run.step):
        yield _again(before, step, t, s, available, dropped)
        yield Commit(step - run.lag, done, took)
        if run.idle:
            yield Idle()


def _header(path: Path) -> Log:
    with _opened(path) as file:
        line = _decoded(file.readline(), str(path))
    if not isinstance(line, Log):
        raise NotALog(f"{path}: does not begin as a decision log does")
    if line.format != FORMAT:
        raise NotALog(f"{path}: is of format {line.format!r}, and {FORMAT!r} is what is read here")
    return line


def _lines(path: Path) -> tuple[list[AnyLine], str]:
    """The lines behind the header, and why they are not all."""
    found: list[AnyLine] = []
    with _opened(path) as file:
        file.readline()
        for line in file:
            if not line.endswith(b"\n"):  # whoever wrote it was stopped in the middle
                return found, f"{path.name} ends in the middle of a line"
            found.append(_decoded(line, str(path)))
    return found, ""


@contextmanager
def _readable(*paths: Path) -> Iterator[None]:
    """What the system says against it, in words that name the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"log {error.filename or ', '.join(map(str, paths))}: {error.strerror or error}") from error


def _opened(path: Path) -> BinaryIO:
    """A file to read, unpacked if it is gzipped."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else path.open("rb")


def _decoded(line: bytes, where: str) -> AnyLine:
    try:
        return decode(line)
    except msgspec.DecodeError as error:
        raise NotALog(f"{where}: is no decision log: {error}") from error
