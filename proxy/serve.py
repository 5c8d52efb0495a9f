"""The proxy as a server."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from engine.core.errors import EngineError
from engine.plugins.frontends.openai import Server, bind, url_of
from engine.proxy.fleet import Fleet
from engine.proxy.options import ProxyOptions
from engine.proxy.routes import Routes

ENDED_POLL = 0.01


def serve(options: ProxyOptions) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code 0.

    Prints ``listening on http://HOST:PORT`` once every engine has been looked at, whether or not they are ready. Port
    0 takes any free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with bind(options.host, options.port) as sock:
        return asyncio.run(_serve(options, sock))


async def _serve(options: ProxyOptions, sock: socket.socket) -> int:
    async with Fleet(options) as fleet:
        server = Server(
            uvicorn.Config(
                Routes(options, fleet).app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=options.shutdown_grace,  # type: ignore[arg-type]  # any number works
            )
        )
        serving = asyncio.create_task(server.serve([sock]))
        with server.signals():
            while not ((server.started and not fleet.unseen) or serving.done()):
                await asyncio.sleep(ENDED_POLL)
            if serving.done():  # it never listened
                await serving
                raise EngineError("the HTTP server ended before it listened")
            print(f"listening on {url_of(sock)}", flush=True)
            await serving
    return 0
