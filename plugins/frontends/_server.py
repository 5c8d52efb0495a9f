"""An application on a socket, by uvicorn, ended by signals of ours."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from engine.core.errors import ConfigError, EngineError

STARTED_POLL = 0.01  # seconds between two looks whether it listens


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal instead of exit code 0.

    Args:
        drains: the first signal is only remembered, for whoever lets open requests end before ``should_exit``.
        reload: called on SIGHUP; ``None``: SIGHUP ends the process, as ever.

    Attribute ``told``: set by the first SIGINT or SIGTERM.
    """

    def __init__(
        self, config: uvicorn.Config, *, drains: bool = False, reload: Callable[[], None] | None = None
    ) -> None:
        super().__init__(config)
        self.told = asyncio.Event()
        self._drains, self._reload = drains, reload

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``signals``."""
        yield

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While inside: the first SIGINT or SIGTERM ends gracefully, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handled: dict[int, Callable[[], None]] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), self._on_signal)
        if self._reload is not None:
            handled[signal.SIGHUP] = self._reload
        before = {number: signal.getsignal(number) for number in handled}
        for number, handler in handled.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number, former in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if former is None else former)

    def _on_signal(self) -> None:
        if self._drains and not self.told.is_set():
            self.told.set()
            return
        if self.told.is_set():
            self.force_exit, self.config.timeout_graceful_shutdown = True, 0
        self.told.set()
        self.should_exit = True


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI,
    sock: socket.socket,
    *,
    grace: float,
    drains: bool = False,
    reload: Callable[[], None] | None = None,
) -> AsyncIterator[tuple[Server, asyncio.Task[None]]]:
    """Serve ``app`` on a socket. Inside, connections are accepted; leaving waits for the end: a signal, or
    ``server.should_exit``.

    Args:
        grace: seconds that open requests have to end then.
        drains, reload: as ``Server`` has them.

    Raises:
        EngineError: it has ended before it listened.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # whatever else is installed: what is refused as no HTTP does not depend on that
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=grace,  # type: ignore[arg-type]  # any number works
    )
    server = Server(config, drains=drains, reload=reload)
    task = asyncio.create_task(server.serve([sock]))
    with server.signals():
        while not (server.started or task.done()):
            await asyncio.sleep(STARTED_POLL)
        if task.done():  # it never listened
            await task
            raise EngineError("the HTTP server ended before it listened")
        yield server, task
        await task


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a listening socket is reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
