"""``engine serve``: the HTTP server."""

from __future__ import annotations

from typing import Annotated

import typer

from engine.cli.flags import chosen, with_config
from engine.core.config import LoadedConfig


@with_config(checked=True)
def serve(
    *,
    loaded: LoadedConfig,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Engine in a thread, not a process of its own.")
    ] = False,
) -> None:
    """Serve a model over HTTP.

    Options of plugins are flags, too: --scheduler.NAME VALUE, --policy.PLUGIN.NAME VALUE. Those of the selected plugins
    are listed below; select others to see theirs.
    """
    from engine.core.protocols import Executor, Frontend
    from engine.core.registry import Registry, build
    from engine.core.serve.client import AsyncEngine

    config = loaded.config
    registry = Registry()
    frontend = build(registry.select("frontend", config.frontend.name), config.frontend)
    assert isinstance(frontend, Frontend)
    executor = registry.select("executor", config.executor.name).cls
    told = getattr(executor, "use", None) is not Executor.use  # what is not told of the model loads none
    typer.echo(f"loading {config.model} …" if told else f"starting executor {executor.name}, without a model …")
    engine = AsyncEngine.launch(config, in_process=in_process)
    try:
        for line in chosen(loaded, engine.description):
            typer.echo(line)
        typer.echo(f"core       {'in this process' if engine.pid is None else f'process {engine.pid}'}")
        code = frontend.serve(engine, host=config.host, port=config.port, api_key=config.api_key)
        health = engine.health()
    finally:
        frontend.close()
        engine.shutdown()
    if not health.ok:
        typer.echo(f"error: the engine died: {health.cause}", err=True)
    raise typer.Exit(code)
