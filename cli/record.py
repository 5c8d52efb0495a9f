"""``engine record``: the decisions of a running server, recorded and written to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.cli.cache import HERE, URL, AsJson, Key, server_at
from engine.core.errors import EngineError


def status(url: URL = HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """Whether decisions are recorded, how much of them, and where."""
    _show(server_at(url, api_key).ask("/debug/record"), as_json)


def on(url: URL = HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """Record from now on. One that begins with the engine (engine serve --record true) can be decided anew exactly."""
    _show(server_at(url, api_key).ask("/debug/record", {"on": True}), as_json)


def off(url: URL = HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """Record no more, and forget what is in memory."""
    _show(server_at(url, api_key).ask("/debug/record", {"on": False}), as_json)


def write(
    file: Annotated[Path, typer.Argument(help="Where to write the decision log, e.g. evening.jsonl.")],
    url: URL = HERE,
    api_key: Key = None,
) -> None:
    """Write what is in the server's memory as a decision log: for engine replay, explain and simulate."""
    try:
        size = server_at(url, api_key).save("/debug/record/log", file)
    except OSError as error:
        raise EngineError(f"{file}: {error.strerror or error}") from error
    typer.echo(f"{file}: {size} bytes")


def _show(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(said))
        return
    if not said["on"]:
        typer.echo("decisions are not recorded")
        return
    typer.echo(f"log        {said['id']}, {'from the start of the engine' if said['whole'] else 'not from the start'}")
    typer.echo(f"memory     {said['lines']} lines, {said['bytes']} of {said['most_bytes']} bytes")
    typer.echo(f"forgotten  {said['dropped_lines']} lines")
    if said["file"] is not None:
        typer.echo(f"file       {said['file']}{'' if said['file_error'] is None else ' (' + said['file_error'] + ')'}")
