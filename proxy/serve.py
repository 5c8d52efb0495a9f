"""The proxy as a server."""

from __future__ import annotations

import asyncio
import logging
import socket

from engine.plugins.frontends._server import bind, serving, url_of
from engine.proxy.fleet import Fleet
from engine.proxy.options import ProxyOptions
from engine.proxy.routes import Routes

SEEN_POLL = 0.01


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
        app = Routes(options, fleet).app()
        async with serving(app, sock, grace=options.shutdown_grace) as (_, task):
            while fleet.unseen and not task.done():
                await asyncio.sleep(SEEN_POLL)
            if not task.done():
                print(f"listening on {url_of(sock)}", flush=True)
    return 0
