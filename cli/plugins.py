"""``engine plugins``: what is installed, from where, and what does not work."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from engine.core.config import ROLE_KEYS, EngineConfig


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List all plugins by role. The default of each role is marked; broken ones say why."""
    from engine.core.registry import Registry

    listing = Registry().listing()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(line) for line in listing], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    defaults = {(role, EngineConfig.model_fields[role].default.name) for role in ROLE_KEYS}
    table = Table("role", "name", "from", "status", "what it is", box=None)
    for line in listing:
        name = " = ".join((line.name, *line.aliases)) + (" *" if (line.role, line.name) in defaults else "")
        words = line.cause if line.status != "ok" else line.summary
        table.add_row(line.role, name, f"{line.distribution} {line.version}".strip(), line.status, words)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    typer.echo("* default. Select with --ROLE NAME (policies: --policy NAME), or pkg.module:Class for local code.")
