"""``engine replay``: decide logs and recorded workloads anew; say where the decisions part, and what that changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cli import _parted
from engine.core.config import flag_of
from engine.core.errors import ConfigError, EngineError
from engine.core.record.reading import is_log, read
from engine.core.replay import log as logs
from engine.core.replay import sglang, vllm
from engine.core.replay.report import NotReplayable, Report

EXIT_DIFFERENT = 1
KINDS = (vllm, sglang)
"""Modules that recognise a foreign trace by its content, and replay it."""
FIELDS = (
    "scheduler", "kvcache", "policies", "overlap", "page_size", "num_pages", "max_batch_tokens", "max_running",
)  # fmt: skip
"""What can be chosen otherwise than it was recorded."""


def replay(
    ctx: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Decision logs (or their folders), and traces of others (JSON)."),
    ],
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", metavar="NAME", help="With another scheduler.")
    ] = None,
    kvcache: Annotated[str | None, typer.Option("--kvcache", metavar="NAME", help="With another KV cache.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="With these policies instead (repeatable; '': none)."),
    ] = None,
    overlap: Annotated[bool | None, typer.Option("--overlap/--no-overlap", help="With the other loop.")] = None,
    page_size: Annotated[int | None, typer.Option("--page-size", help="With pages of so many tokens.")] = None,
    num_pages: Annotated[int | None, typer.Option("--num-pages", help="With so many pages.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option("--max-batch-tokens", help="With other steps.")] = None,
    max_running: Annotated[int | None, typer.Option("--max-running", help="With so many requests at once.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Decide recorded schedules anew with the real scheduler and cache, and compare step by step.

    As recorded: exit status 0 only if every step is equal. With another plugin or option: where the decisions part, and
    what that changed. Options of plugins are flags, too: --policy.NAME.OPTION VALUE.
    """
    wishes = {name: value for name, value in ctx.params.items() if name in FIELDS and value is not None}
    if policy is not None:
        wishes["policies"] = [name for name in policy if name]
    for key in ctx.obj or {}:
        if key.partition(".")[0] not in ("policy", *FIELDS):
            raise ConfigError(f"'replay' takes no plugin options such as {flag_of(key)}")
    changes = {**wishes, **(ctx.obj or {})}
    if changes:
        _compare(files, changes, as_json)
        return
    reports = [_replay(path) for path in files]
    if as_json:
        typer.echo(json.dumps([_parted.plain(report) for report in reports]))
    else:
        for line in _parted.told(reports):
            typer.echo(line)
    raise typer.Exit(0 if all(report.equal for report in reports) else EXIT_DIFFERENT)


replay.engine_fields = FIELDS  # type: ignore[attr-defined]  # for the help of the selected plugins


def _compare(files: list[Path], changes: Mapping[str, Any], as_json: bool) -> None:
    found = []
    for path in files:
        if not is_log(path):
            raise ConfigError(f"{path}: plugins and options are chosen for decision logs of our own engine")
        try:
            found.append(_parted.compared(read(path), path.stem, changes))
        except NotReplayable as error:
            raise EngineError(f"{path}: {error}") from error
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found:
        for line in _parted.table(one):
            typer.echo(line)


def _replay(path: Path) -> Report:
    name = path.stem
    try:
        if is_log(path):
            return logs.replay(read(path), name)
        data = _read(path)
        name = str(data.get("name", name))
        kind = next((kind for kind in KINDS if kind.recognises(data)), None)
        if kind is None:
            return Report(name, 0, unsupported="not a trace of a known kind")
        report: Report = kind.replay(data)
        return report
    except NotReplayable as error:
        return Report(name, 0, unsupported=str(error))
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, EngineError) as error:  # the other files are replayed
        return Report(name, 0, unsupported=f"it does not hold together: {type(error).__name__}: {error}")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: not a trace: a JSON object is expected")
    return data
