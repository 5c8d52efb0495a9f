"""The command line as a whole: its commands, and what they have in common."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from engine.cli import (
    bench,
    cache,
    config,
    doctor,
    embed,
    explain,
    generate,
    plugin_check,
    plugin_new,
    plugin_show,
    plugins,
    proxy,
    record,
    render,
    replay,
    serve,
    simulate,
    top,
)
from engine.cli.flags import split_dotted
from engine.cli.option_help import EngineCommand
from engine.core.errors import EngineError

EXIT_REFUSED = 2
COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve.serve,
    "proxy": proxy.proxy,
    "top": top.top,
    "generate": generate.generate,
    "embed": embed.embed,
    "config": config.config,
    "doctor": doctor.doctor,
    "render": render.render,
    "replay": replay.replay,
    "simulate": simulate.simulate,
    "bench": bench.bench,
    "explain": explain.explain,
}
OF_CACHE: dict[str, Callable[..., None]] = {
    "stats": cache.stats,
    "explain": cache.explain,
    "flush": cache.flush,
    "check": cache.check,
}
OF_RECORD: dict[str, Callable[..., None]] = {
    "status": record.status,
    "on": record.on,
    "off": record.off,
    "write": record.write,
}
OF_PLUGINS: dict[str, Callable[..., None]] = {
    "list": plugins.plugins,
    "show": plugin_show.show,
    "new": plugin_new.new,
    "check": plugin_check.check,
}


def build() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="engine", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        help="An LLM serving engine made of plugins.",
    )  # fmt: skip
    app.callback()(_common)
    for name, command in COMMANDS.items():
        app.command(name, cls=EngineCommand)(_clean(command))
    group = typer.Typer(invoke_without_command=True)
    group.callback()(_clean(_when_alone(plugins.plugins)))
    for name, of_plugins in OF_PLUGINS.items():
        group.command(name, cls=EngineCommand)(_clean(of_plugins))
    app.add_typer(group, name="plugins")
    asked = typer.Typer(no_args_is_help=True, help="Ask a running server what it has cached.")
    for name, of_cache in OF_CACHE.items():
        asked.command(name)(_clean(of_cache))
    app.add_typer(asked, name="cache")
    recorded = typer.Typer(no_args_is_help=True, help="Record the decisions of a running server.")
    for name, of_record in OF_RECORD.items():
        recorded.command(name)(_clean(of_record))
    app.add_typer(recorded, name="record")
    return app


def run(arguments: Sequence[str]) -> None:
    """Run the command line; ends the process."""
    plain, dotted = split_dotted(arguments)
    build()(args=plain, prog_name="engine", obj=dotted)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sixhooks {version('sixhooks')}")
        raise typer.Exit


def _common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """An LLM serving engine made of plugins."""


def _when_alone(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command of a group that was named without a command of its own."""

    @functools.wraps(command)
    def wrapper(ctx: typer.Context, **given: Any) -> None:
        if ctx.invoked_subcommand is None:
            command(ctx=ctx, **given)

    return wrapper


def _clean(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that we raise on purpose are one line for people, not a traceback."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except EngineError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(EXIT_REFUSED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    return wrapper
