"""``engine replay``: decide recorded workloads anew, and say where the decisions part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from engine.core.config import flag_of, load_config
from engine.core.errors import ConfigError, EngineError
from engine.core.protocols import Policy
from engine.core.registry import build
from engine.core.replay import own, sglang, vllm
from engine.core.replay.report import NotReplayable, Report

EXIT_DIFFERENT = 1
KINDS = (own, vllm, sglang)
"""Modules that recognise a trace by its content, and replay it."""


def replay(
    ctx: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Decision traces (JSON).")],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Instead of the policies of a recording of ours (repeatable).", metavar="NAME"),
    ] = None,
) -> None:
    """Replay decision traces on our own schedulers and caches; exit status 0 only if every step is equal.

    Options of policies are flags, too: --policy.NAME.OPTION VALUE.
    """
    policies = _policies(policy, ctx.obj or {})
    reports = [_replay(path, policies) for path in files]
    for report in reports:
        if report.unsupported is not None:
            print(f"{report.name}: not replayed: {report.unsupported}")
        elif report.divergence is not None:
            print(f"{report.name}: differs")
            print("\n".join(report.divergence.lines()))
    equal = sum(report.equal for report in reports)
    print(f"{equal} of {len(reports)} traces equal, {sum(report.steps for report in reports)} steps")
    raise typer.Exit(0 if equal == len(reports) else EXIT_DIFFERENT)


replay.engine_fields = ("policies",)  # type: ignore[attr-defined]  # for the help of the selected plugins


def _policies(names: list[str] | None, dotted: Mapping[str, str]) -> Callable[[], list[Policy]] | None:
    """Makes the policies that were chosen, anew for each file; ``None``: none were. Raises as ``build`` does."""
    from engine.core.effective import Effective

    if not names and not dotted:
        return None
    for key in dotted:
        if key.partition(".")[0] not in ("policy", "policies"):
            raise ConfigError(f"'replay' takes no plugin options such as {flag_of(key)}: only those of policies")
    loaded = load_config(flags={**({"policies": names} if names else {}), **dotted})
    chosen = Effective(loaded, fields=("policies",)).plugins
    return lambda: [cast(Policy, build(one.found, one.selected.selection)) for one in chosen]


def _replay(path: Path, policies: Callable[[], list[Policy]] | None) -> Report:
    data = _read(path)
    name = str(data.get("name", path.stem))
    kind = next((kind for kind in KINDS if kind.recognises(data)), None)
    if kind is None:
        return Report(name, 0, unsupported="not a trace of a known kind")
    if policies is not None and kind is not own:
        return Report(name, 0, unsupported="--policy is for recordings of our own engine")
    try:
        report: Report = kind.replay(data) if policies is None else own.replay(data, policies())
        if kind is own and (lost := own.left_out(data)) and not report.equal:
            print(f"{name}: its metadata {', '.join(lost)} could not be recorded: policies do not see it")
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
