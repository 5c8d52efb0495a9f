"""``engine explain``: a request's story, from a running server or from a decision log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from engine.cli._explained import lines_of
from engine.cli.cache import HERE, AsJson, Key, server_at
from engine.core.record.reading import read
from engine.core.record.story import find, tell


def explain(
    request: Annotated[str, typer.Argument(help="Its X-Request-Id, or its name in the engine; in a log, its number.")],
    source: Annotated[str, typer.Argument(help="Where the server listens, or a decision log.")] = HERE,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Why a request waited, step by step, what would unblock it, what took its pages, and what it found cached."""
    said = _from_log(request, Path(source)) if _is_file(source) else _from_server(request, source, api_key)
    if as_json:
        typer.echo(json.dumps(said))
        return
    for number, one in enumerate(said):
        if number:
            typer.echo()
        for line in lines_of(one):
            typer.echo(line)


def _is_file(source: str) -> bool:
    return "//" not in source and (source.endswith((".jsonl", ".gz")) or Path(source).exists())


def _from_server(request: str, url: str, api_key: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server_at(url, api_key).ask(f"/debug/requests/{quote(request, safe='')}")["requests"]
    return found


def _from_log(request: str, path: Path) -> list[dict[str, Any]]:
    return [{"id": request, "live": None, "recorded": True, "story": tell(find(read(path), request))}]
