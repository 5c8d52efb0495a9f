"""``engine top``: a live view of a running server."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from engine.cli.cache import HERE, URL, Key, server_at
from engine.core.errors import EngineError


def top(
    url: URL = HERE,
    api_key: Key = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view (of one interval) and end.")] = False,
) -> None:
    """Watch a running server: its state, the queue with reasons, pages, hit rate, tokens a second, waiting times.

    Ends with Ctrl-C.
    """
    from rich.console import Console
    from rich.live import Live

    from engine.cli._top_frame import Sample, frame, trouble

    server, console = server_at(url, api_key), Console()
    before = Sample.of(server)
    time.sleep(interval)
    now = Sample.of(server)
    if once:
        console.print(frame(server.url, before, now))
        return
    with Live(frame(server.url, before, now), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                before, now = now, Sample.of(server)
                live.update(frame(server.url, before, now), refresh=True)
            except EngineError as error:  # it may come back
                live.update(trouble(server.url, str(error)), refresh=True)
