"""``engine serve``: the HTTP server."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Annotated

import typer

from engine.cli.flags import chosen, with_config
from engine.core.config import EngineConfig, LoadedConfig

if TYPE_CHECKING:
    from engine.core.protocols import Frontend


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
    from engine.core.serve.printing import keep_printing

    keep_printing()
    config = loaded.config
    if config.api_key_file is not None:  # who tells us to read it again while the model loads must not end us
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if config.log_requests or config.log_prompts:
        log_to_stderr("engine.requests")
    registry = Registry()
    frontend = build(registry.select("frontend", config.frontend.name), config.frontend)
    assert isinstance(frontend, Frontend)
    executor = registry.select("executor", config.executor.name).cls
    told = getattr(executor, "use", None) is not Executor.use  # what is not told of the model loads none
    typer.echo(f"loading {config.model} …" if told else f"starting executor {executor.name}, without a model …")
    engine: AsyncEngine | None = None
    try:
        key = prepare(frontend, config)
        engine = AsyncEngine.launch(config, in_process=in_process)
        for line in chosen(loaded, engine.description):
            typer.echo(line)
        typer.echo(f"core       {'in this process' if engine.pid is None else f'process {engine.pid}'}")
        code = frontend.serve(engine, host=config.host, port=config.port, api_key=key)
        health = engine.health()
    finally:
        frontend.close()
        if engine is not None:
            engine.shutdown()
    if not health.ok:
        typer.echo(f"error: the engine died: {health.cause}", err=True)
    raise typer.Exit(code)


def prepare(frontend: Frontend, config: EngineConfig) -> str | None:
    """Give the frontend its keys, and let it listen. Returns the key where there is one and no file: any frontend
    knows that much.

    Raises:
        ConfigError: the file of keys cannot be used, the frontend does not know several keys, or it cannot listen.
    """
    from engine.core.keys import guarded

    key = guarded(frontend, config)
    frontend.open(host=config.host, port=config.port)
    return key


def log_to_stderr(name: str) -> None:
    """Show what this logger says, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
