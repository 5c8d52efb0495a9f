"""``engine plugins``: what is installed, from where, what is active here, and what does not work."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.flags import with_config
from engine.core.config import ROLE_KEYS, SINGULAR, EngineConfig, LoadedConfig
from engine.core.errors import EngineError

if TYPE_CHECKING:
    from engine.core.effective import Selected
    from engine.core.registry import PluginListing, Registry

EXIT_REFUSED = 2
SERVING_ONLY = tuple(name for name in EngineConfig.model_fields if name not in {*ROLE_KEYS, *SINGULAR})


@dataclasses.dataclass
class Line:
    """A plugin, and whether this configuration selects it."""

    plugin: PluginListing
    active: bool = False


@with_config(without=SERVING_ONLY)
def plugins(
    *,
    loaded: LoadedConfig,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List all plugins by role; those that this configuration (flags, environment, --config) selects are marked.

    Exit code 2 if one of them does not work; broken ones that nobody selects are only listed.
    """
    from engine.core.effective import selected
    from engine.core.registry import Registry

    registry = Registry()
    lines = [Line(plugin) for plugin in registry.listing()]
    for one in selected(registry, loaded.config):
        mark(lines, registry, one, loaded.origins)
    lines.sort(key=lambda line: line.plugin.role)
    if as_json:
        typer.echo(json.dumps([{**dataclasses.asdict(line.plugin), "active": line.active} for line in lines], indent=2))
    else:
        show(lines)
    failed = [line.plugin for line in lines if line.active and line.plugin.status != "ok"]
    for plugin in failed:
        typer.echo(f"error: {plugin.cause}", err=True)
    if failed:
        raise typer.Exit(EXIT_REFUSED)


def mark(lines: list[Line], registry: Registry, one: Selected, origins: Mapping[str, str]) -> None:
    """Mark the line of a selected plugin, or add one for what is not installed. Its options are checked too."""
    from engine.core.effective import checked_options
    from engine.core.registry import PluginListing, build

    role, selection = one.role, one.selection
    mine = [line for line in lines if line.plugin.role == role and selection.name == line.plugin.name]
    mine = mine or [line for line in lines if line.plugin.role == role and selection.name in line.plugin.aliases]
    try:
        found = registry.select(role, selection.name)
        checked_options(found, one, origins)
        build(found, selection).close()
        status, cause, summary = "ok", "", (found.cls.__doc__ or "").strip().split("\n")[0]
        owner, version = found.distribution, found.version
    except EngineError as error:
        status, cause, summary, owner, version = "broken", str(error), "", "", ""
    if not mine:
        target = selection.name if ":" in selection.name else ""
        mine = [Line(PluginListing(role, selection.name, (), owner, version, target, status, cause, summary))]
        lines += mine
    for line in mine:
        line.active = True
        if status != "ok":
            line.plugin = dataclasses.replace(line.plugin, status=status, cause=cause)


def show(lines: list[Line]) -> None:
    """The table, for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("role", "name", "from", "status", "what it is", box=None)
    for line in lines:
        plugin = line.plugin
        name = " = ".join((plugin.name, *plugin.aliases)) + (" *" if line.active else "")
        words = plugin.cause if plugin.status != "ok" else plugin.summary
        cells = (plugin.role, name, f"{plugin.distribution} {plugin.version}".strip(), plugin.status, words)
        table.add_row(*(Text(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    typer.echo("* active with this configuration (flags, environment and --config are looked at).")
    typer.echo("Select with --ROLE NAME (policies: --policy NAME), or pkg.module:Class for local code.")
