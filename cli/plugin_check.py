"""``engine plugins check TARGET``: the role's suite, a fuzz of hostile workloads, and what the plugin costs."""

from __future__ import annotations

import random
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from engine.core.errors import ConfigError, PluginError, suggest

if TYPE_CHECKING:
    from engine.testing import Suite
    from engine.testing.checking import Report
    from engine.testing.watched import Stopped

EXIT_VIOLATION = 1


def check(
    target: Annotated[
        str, typer.Argument(help="Plugin name, distribution, or pkg.module:Class of a plugin or of a test suite.")
    ],
    option: Annotated[
        list[str] | None, typer.Option("--option", help="The plugin's option (repeatable).", metavar="KEY=VALUE")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the fuzz (default: a new one).", metavar="N")] = None,
    workloads: Annotated[int, typer.Option("--workloads", help="Hostile workloads to try.", metavar="N", min=0)] = 20,
    cost_limit: Annotated[
        float, typer.Option("--cost-limit", help="Most times that a step may cost with it; 0: not measured.", min=0)
    ] = 2.0,
    running: Annotated[
        int, typer.Option("--running", help="Requests that run while the cost is measured.", metavar="N", min=1)
    ] = 256,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", help="Seconds that one rule or workload may take; 0: any.", metavar="S", min=0),
    ] = 120.0,
) -> None:
    """Check a plugin before trusting it: every rule of its role, hostile workloads, and what it costs a step.

    A plugin that hangs, or takes the process down, is told with its stack. Exit code 0 if all holds, 1 at the first
    rule that does not, 2 if there is nothing to check.
    """
    from engine.core.registry import Registry
    from engine.testing.checking import check as check_one
    from engine.testing.checking import suites
    from engine.testing.watched import Place, watched

    first = Place(target, "A plugin can be imported.", "import")
    watch = watched(time_limit, first, lambda stopped: tell_stopped(stopped, again(target, option), time_limit))
    registry = Registry()
    chosen = suites(target, registry, options_of(option or []))
    if not chosen:
        known = {word for _, *words in registry.owners() for word in words}
        raise PluginError(f"no plugin and no distribution is named {target!r}: {suggest(target, known)}")
    for suite in chosen:
        check_options(suite, option or [])
    held = True
    for suite in chosen:
        fuzz = random.SystemRandom().randrange(10**6) if seed is None else seed
        report = check_one(suite, seed=fuzz, workloads=workloads, cost_limit=cost_limit or None, running=running,
                           watch=watch)  # fmt: skip
        tell(report, again(target, option))
        held = held and report.finding is None
    if not held:
        raise typer.Exit(EXIT_VIOLATION)


def options_of(words: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` words as options. Raises ``ConfigError`` for others."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--option {word!r} is no KEY=VALUE")
    pairs = (word.split("=", 1) for word in words)
    return {key.replace("-", "_"): value for key, value in pairs}


def check_options(suite: type[Suite], words: list[str]) -> None:
    """Raise ``ConfigError`` where options cannot be the plugin's: that is no rule which the plugin breaks."""
    from engine.core.config import Selection
    from engine.core.effective import Selected, checked_options

    given = options_of(words)
    if words and suite.options != given:
        raise ConfigError(f"--option {words[0]!r}: {suite.__name__} is a suite and has options of its own")
    found = suite().found()
    for name, field in found.cls.Options.model_fields.items():
        if field.is_required() and name not in suite.options:
            raise ConfigError(f"{found.role} {found.cls.name!r} needs option {name}: --option {name}=…")
    one = Selected(found.role, found.role, Selection(name=found.cls.name, options=dict(suite.options)))
    checked_options(found, one, {f"{found.role}.{key}": f"--option {key}={value}" for key, value in given.items()})


def again(target: str, option: list[str] | None) -> str:
    """The command that tries the same."""
    words = ["engine", "plugins", "check", target]
    for word in option or ():
        words += ["--option", word]
    return shlex.join(words)


def tell(report: Report, command: str) -> None:
    """The report, for people."""
    found = report.found
    origin = f"{found.distribution} {found.version}".strip()
    typer.echo(f"{found.role} {found.cls.name} ({origin})")
    typer.echo(f"  rules      {report.rules} hold")
    if report.workloads:
        typer.echo(f"  workloads  {report.workloads} hold (seed {report.seed})")
    if report.cost is not None:
        typer.echo(f"  cost       {report.cost}")
    for note in report.notes:
        typer.echo(f"  note       {note}")
    if report.finding is None:
        typer.echo("  ok")
        return
    typer.echo(f"  BROKEN     {report.finding.rule}")
    typer.echo(f"  what       {report.finding.words}")
    typer.echo(f"  where      {report.finding.where} (seed {report.seed})")
    typer.echo(f"  again      {command} --seed {report.seed}")


def tell_stopped(stopped: Stopped, command: str, limit: float) -> None:
    """A check that had to be ended, for people."""
    place = stopped.place
    typer.echo(place.plugin)
    typer.echo(f"  BROKEN     {place.rule}")
    typer.echo(f"  what       {stopped.words}")
    typer.echo(f"  where      {place.where}" + ("" if place.seed is None else f" (seed {place.seed})"))
    for number, line in enumerate(stopped.stack):
        typer.echo(f"  {'stack' if number == 0 else '':<10} {line}")
    seed = "" if place.seed is None else f" --seed {place.seed}"
    typer.echo(f"  again      {command}{seed} --time-limit {limit:g}")
