"""``engine replay``: decide recorded workloads anew, and say where the decisions part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.core.errors import ConfigError, EngineError
from engine.core.replay import own, sglang, vllm
from engine.core.replay.report import NotReplayable, Report

EXIT_DIFFERENT = 1
KINDS = (own, vllm, sglang)
"""Modules that recognise a trace by its content, and replay it."""


def replay(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Decision traces (JSON).")],
) -> None:
    """Replay decision traces on our own schedulers and caches; exit status 0 only if every step is equal."""
    reports = [_replay(path) for path in files]
    for report in reports:
        if report.unsupported is not None:
            print(f"{report.name}: not replayed: {report.unsupported}")
        elif report.divergence is not None:
            print(f"{report.name}: differs")
            print("\n".join(report.divergence.lines()))
    equal = sum(report.equal for report in reports)
    print(f"{equal} of {len(reports)} traces equal, {sum(report.steps for report in reports)} steps")
    raise typer.Exit(0 if equal == len(reports) else EXIT_DIFFERENT)


def _replay(path: Path) -> Report:
    data = _read(path)
    name = str(data.get("name", path.stem))
    kind = next((kind for kind in KINDS if kind.recognises(data)), None)
    if kind is None:
        return Report(name, 0, unsupported="not a trace of a known kind")
    try:
        report: Report = kind.replay(data)
    except NotReplayable as error:
        report = Report(name, 0, unsupported=str(error))
    except (KeyError, IndexError, TypeError, ValueError, EngineError) as error:  # the other files are replayed
        report = Report(name, 0, unsupported=f"it does not hold together: {type(error).__name__}: {error}")
    return report


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: not a trace: a JSON object is expected")
    return data
