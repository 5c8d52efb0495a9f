"""Frontends: doors for clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from engine.core.errors import ConfigError
from engine.core.protocols.plugin import Plugin

if TYPE_CHECKING:
    from engine.core.keys import Keys


class Frontend(Plugin, ABC):
    """Serves people: an HTTP server or anything that feeds requests to an engine and streams results."""

    @abstractmethod
    def serve(self, engine: Any, *, host: str, port: int, api_key: str | None = None) -> int:
        """Serve until SIGINT or SIGTERM; ``engine`` is an ``AsyncEngine``. Returns the process's exit code: 0 if the
        engine is well then. Leaves no thread and no socket behind.

        Args:
            port: 0 takes any free one.
            api_key: what clients must send; ``None``: anybody may ask.

        Raises:
            ConfigError: it cannot listen there.
        """

    def guard(self, keys: Keys) -> None:
        """Several keys, or keys with labels: ask for one of them, not ``api_key``. Called before ``serve`` or ``app``.

        The label of a key is the tenant of whoever sends it: ``Ask.tenant``, empty for a key without one.

        Raises:
            ConfigError: this frontend knows one key only (the default).
        """
        raise ConfigError(f"frontend {self.name} knows one key only: give one --api-key, and no --api-key-file")

    def open(self, *, host: str, port: int) -> None:
        """The engine is about to be loaded, which may take minutes. Called at most once, before ``serve``.

        A frontend may listen from now on and say that it is starting. Default: nothing is done.

        Raises:
            ConfigError: it cannot listen there.
        """

    def app(self, engine: Any, *, api_key: str | None = None) -> Any:
        """The same as an ASGI application, for a host that serves it: no socket, no signals, no lifespan of its own.

        Raises:
            ConfigError: this frontend is no ASGI application (the default).
        """
        raise ConfigError(f"frontend {self.name} cannot be mounted in another application")
