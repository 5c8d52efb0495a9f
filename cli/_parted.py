"""What a replay found, for people and programs: equal or not, where decisions part, and what that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from engine.core.config import load_config
from engine.core.effective import Effective
from engine.core.record.reading import DecisionLog
from engine.core.replay import log as logs
from engine.core.replay.log import OF_WORK, Setup
from engine.core.replay.report import NotReplayable, Report
from engine.core.replay.what_if import Figures, fitted, names, simulate

ROLES = ("scheduler", "kvcache")
LIMITS = ("page_size", "num_pages", "max_batch_tokens", "max_running")


def told(reports: Sequence[Report]) -> Iterator[str]:
    """Reports as lines."""
    for report in reports:
        if report.unsupported is not None:
            yield f"{report.name}: not replayed: {report.unsupported}"
        elif report.divergence is not None:
            yield f"{report.name}: differs"
            yield from report.divergence.lines()
    equal = sum(report.equal for report in reports)
    yield f"{equal} of {len(reports)} traces equal, {sum(report.steps for report in reports)} steps"


def plain(report: Report) -> dict[str, Any]:
    """A report as values."""
    return {**asdict(report), "equal": report.equal}


def setup_with(log: DecisionLog, changes: Mapping[str, Any]) -> Setup:
    """How a log was decided, with changes: fields of the configuration and options of plugins, by their dotted names.

    Options of a plugin that stays change these alone.

    Raises:
        ConfigError, PluginError: as ``engine serve`` does. NotReplayable: the log's header says too little.
    """
    setup = Setup.of(log.header.config)
    flags: dict[str, Any] = {}
    for role in ROLES:
        name, options = getattr(setup, role)
        if role not in changes:
            flags |= {role: name, **{f"{role}.{option}": value for option, value in options.items()}}
    if "policies" not in changes:
        flags["policies"] = [{"name": name, **options} for name, options in setup.policies]
    loaded = load_config(flags={**flags, **changes})
    chosen: dict[str, list[tuple[str, dict[str, Any]]]] = {"scheduler": [], "kvcache": [], "policy": []}
    for one in Effective(loaded, fields=("scheduler", "kvcache", "policies")).plugins:
        chosen[one.selected.role].append((one.selected.selection.name, one.options.model_dump(mode="json")))
    limits = replace(setup.limits, **{name: getattr(loaded.config, name) for name in LIMITS if name in changes})
    return replace(
        setup, limits=limits, scheduler=chosen["scheduler"][0], kvcache=chosen["kvcache"][0],
        policies=tuple(chosen["policy"]), overlap=changes.get("overlap", setup.overlap),
    )  # fmt: skip


def compared(log: DecisionLog, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A log as it was, and in simulated time as it was recorded and with changes; and the first step that differs.

    Raises:
        ConfigError, PluginError: the changes cannot be. NotReplayable: the log says too little, or nothing comes of it.
    """
    setup, times = setup_with(log, changes), fitted(log)
    parted, unknown, steps = None, None, 0
    if setup.overlap != log.header.config["overlap"]:
        unknown = "steps that overlap are planned before the outcome that the others follow"
    else:
        try:
            report = logs.replay(log, name, setup, OF_WORK)
            parted, steps = report.divergence, report.steps
        except NotReplayable as error:
            unknown = str(error)
    return {
        "name": name,
        "changes": dict(changes),
        "parted": None if parted is None else asdict(parted),
        "unknown": unknown,
        "equal_steps": steps,
        "requests": len(log.adds),
        "step_times": asdict(times),
        "recorded": asdict(Figures.recorded(log)),
        "same": asdict(simulate(log, Setup.of(log.header.config), times)),
        "changed": asdict(simulate(log, setup, times)),
    }


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The same as lines."""
    changes = ", ".join(f"{key} {value}" for key, value in found["changes"].items())
    yield f"{found['name']}: {found['requests']} requests, with {changes}"
    if found["unknown"] is not None:
        yield f"where the decisions part is not known: {found['unknown']}"
    elif found["parted"] is None:
        yield f"all {found['equal_steps']} steps are the same"
    else:
        yield f"the decisions part at step {found['parted']['step']}, after {found['equal_steps']} equal steps"
        for name, recorded in found["parted"]["recorded"].items():
            decided = found["parted"]["decided"].get(name)
            if recorded != decided:
                yield f"    {name:<10} recorded {recorded!r:.100}"
                yield f"    {'':<10} decided  {decided!r:.100}"
    times = found["step_times"]
    yield (
        f"step times fitted to {times['steps']} steps (mean error {times['error']:.0%}): "
        f"{times['constant'] * 1e3:.3g} ms + {times['row'] * 1e6:.3g} us a row + {times['token'] * 1e6:.3g} us a token"
    )
    columns = [found[name] for name in ("recorded", "same", "changed")]
    yield f"{'':<20}{'recorded':>14}{'simulated':>14}{'changed':>14}{'':>9}"
    for name in names([Figures(**column) for column in columns]):
        values = [{**column["times"], **column["totals"]}.get(name) for column in columns]
        yield f"{name:<20}" + "".join(f"{_shown(name, value):>14}" for value in values) + f"{_ratio(*values[1:]):>9}"
    for how in sorted({how for column in columns for how in column["ended"]}):
        yield f"{'ended ' + how:<20}" + "".join(f"{column['ended'].get(how, 0):>14}" for column in columns)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3f} ms" if name.startswith(("ttft", "itl")) else f"{value:g}"


def _ratio(before: float | None, after: float | None) -> str:
    return "" if not before or after is None else f"{(after - before) / before:+.0%}"
