"""``engine cache``: what a server has cached, why something is not found, a flush, and a check of its events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.core.errors import EngineError

if TYPE_CHECKING:
    from engine.cli._http import Server

URL = Annotated[str, typer.Argument(help="Where the server listens.")]
Key = Annotated[str | None, typer.Option("--api-key", help="The server's key (default: ENGINE_API_KEY).")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
HERE = "http://127.0.0.1:8000"
MUCH = 8  # differing keys that are shown


def stats(url: URL = HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """Pages, hit rate, tiers, and where the events stand."""
    said = server_at(url, api_key).ask("/v1/cache/stats")
    if as_json:
        typer.echo(json.dumps(said))
        return
    pages, rate = said["pages"], said["hit_rate"]
    typer.echo(f"kvcache    {said['kvcache']}, {said['page_size']} tokens a page")
    typer.echo("pages      " + ", ".join(f"{count} {name}" for name, count in pages.items()))
    found = f"{said['cached_tokens']} of {said['looked_up_tokens']} tokens"
    typer.echo(f"hits       {'nothing was looked up yet' if rate is None else f'{rate:.1%}: {found}'}")
    typer.echo(f"evicted    {said['evicted_pages']} pages")
    for name, numbers in said["tiers"].items():
        typer.echo(f"tier       {name}: " + (", ".join(f"{key} {value}" for key, value in numbers.items()) or "-"))
    if said["epoch"] is None:
        typer.echo("events     off (--cache-events on)")
    else:
        typer.echo(f"events     epoch {said['epoch']}, the next is {said['sequence']}")


def explain(
    prompt: Annotated[str, typer.Argument(help="Text, or token ids as a JSON list.")],
    url: URL = HERE,
    salt: Annotated[str, typer.Option("--salt", help="The request's cache_salt.")] = "",
    adapter: Annotated[str, typer.Option("--adapter", help="The request's adapter.")] = "",
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """How much of a prompt is cached, and why no more. Changes nothing."""
    body = {"prompt": prompt_of(prompt), "cache_salt": salt, "adapter": adapter}
    said = server_at(url, api_key).ask("/v1/cache/explain", body)
    if as_json:
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{said['cached_tokens']} of {said['tokens']} tokens are cached ({said['cached_pages']} pages)")
    missing = said["missing"]
    if missing is not None:
        start, end = missing["tokens"]
        typer.echo(f"page {missing['page']} (tokens {start} to {end - 1}): {missing['words']} [{missing['why']}]")


def flush(
    url: URL = HERE,
    tiers: Annotated[bool, typer.Option("--tiers", help="Also what connectors keep, those that can forget.")] = False,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Forget all cached content: what is idle at once, what is in use when its requests end."""
    said = server_at(url, api_key).ask("/v1/cache/flush", {"tiers": tiers})
    if as_json:
        typer.echo(json.dumps(said))
        return
    typer.echo(f"{said['freed_pages']} pages are free again; {said['in_use']} are in use and go when their users end")
    for name, outcome in said["tiers"].items():
        typer.echo(f"tier {name}: {f'{outcome} pages forgotten' if isinstance(outcome, int) else outcome}")


def check(
    url: URL = HERE,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="For how long to follow the events.")] = 10.0,
    over_zmq: Annotated[bool, typer.Option("--zmq", help="By the published ZMQ endpoints, not over HTTP.")] = False,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Follow a server's cache events for a while, then compare the index with a dump of its cache.

    Exit code 0 if they are equal, 1 if not.
    """
    from engine.cli.cache_check import compare

    found = compare(server_at(url, api_key), seconds, over_zmq=over_zmq)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        tell(found)
    if not found["equal"]:
        raise typer.Exit(1)


def server_at(url: str, api_key: str | None) -> Server:
    """The server that is asked. What speaks HTTP is imported now, not whenever ``engine`` starts."""
    from engine.cli._http import Server

    return Server(url, api_key)


def tell(found: dict[str, Any]) -> None:
    """What a check has found, for people."""
    typer.echo(
        f"followed {found['events']} events of epoch {found['epoch']} up to {found['sequence']} "
        f"({found['snapshots']} snapshots, {found['replays']} replays)"
    )
    if found["equal"]:
        typer.echo(f"equal: {found['pages']} pages")
        return
    for name, words in (("missing", "cached, and not in the index"), ("extra", "in the index, and not cached")):
        keys = found[name]
        if keys:
            typer.echo(f"{len(keys)} pages are {words}: {', '.join(keys[:MUCH])}{' …' if len(keys) > MUCH else ''}")


def prompt_of(text: str) -> str | list[int]:
    """Text, or token ids where it is a JSON list. Raises ``EngineError`` for another list."""
    if not text.startswith("["):
        return text
    try:
        tokens = json.loads(text)
    except ValueError:
        return text
    if not all(type(token) is int for token in tokens):
        raise EngineError("a JSON list as a prompt holds token ids: whole numbers")
    found: list[int] = tokens
    return found
