"""A core, the way to it, and its death: what ``AsyncEngine`` stands on."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

from engine.core import errors
from engine.core.config import EngineConfig
from engine.core.errors import EngineDead, EngineError
from engine.core.serve.flow import Inbox
from engine.core.serve.home import Home
from engine.core.serve.messages import Command, Event, Fatal, Outputs, Ready, Taken
from engine.core.serve.transport import Packed, ProcessTransport, ThreadTransport, Transport, wait_until
from engine.core.serve.watchdog import Watchdog

DAYS = 1e6
OWN_ERRORS = ("ConfigError", "PluginError", "ModelError")


class Link:
    """Starts a core, carries commands to it, and hands its events and its death to one event loop.

    Args:
        on_event: called in the event loop with every event but ``Ready`` and ``Fatal``.
        on_death: called in the event loop once the core is gone for good.

    Attributes:
        cause: why the core is gone; ``None`` while it lives. Set first, told afterwards; any thread may read it.
        ready: what the core said when it was loaded.
        watchdog: when the core was last heard of, and when work last came forward.
    """

    def __init__(
        self,
        config: EngineConfig,
        watchdog: Watchdog,
        *,
        in_process: bool,
        on_event: Callable[[Event], None],
        on_death: Callable[[], None],
    ) -> None:
        self.cause: str | None = None
        self.ready: Ready | None = None
        self._fatal: Fatal | None = None
        self._told = threading.Event()
        self._on_event, self._on_death = on_event, on_death
        self._closed = False
        self.watchdog = watchdog
        self._home = Home()
        self._inbox = Inbox(lambda count: self.send(Taken(count)))
        kind = ThreadTransport if in_process else ProcessTransport
        self._transport: Transport = kind(config, self._receive, self._declare_dead, watchdog)

    @property
    def pid(self) -> int | None:
        """The core's process, if it has one of its own."""
        return self._transport.pid

    def wait(self) -> Ready:
        """Block until the model is loaded. Raises the core's own error, or ``EngineDead``."""
        wait_until(self._told, DAYS)
        if self.ready is not None:
            return self.ready
        assert self._fatal is not None
        if self._fatal.kind in OWN_ERRORS:
            kind: type[EngineError] = getattr(errors, self._fatal.kind)
            raise kind(self._fatal.message)
        raise EngineDead(f"{self._fatal.kind}: {self._fatal.message}")

    def check(self) -> None:
        """Raise ``EngineDead`` if the core is gone, or belongs to the process that this one was forked off."""
        self._home.check()
        if self.cause is not None:
            raise EngineDead(self.cause)

    def send(self, command: Command) -> None:
        """Send a command. Never blocks."""
        self.put(self.pack(command))

    def pack(self, command: Command) -> Packed:
        """A command as ``put`` takes it. Any thread may ask; for a long one it takes a while."""
        return self._transport.pack(command)

    def put(self, packed: Packed) -> None:
        """Send what was packed. Never blocks."""
        self._transport.put(packed)

    def bind(self, busy: bool) -> bool:
        """Events go to the running event loop from now on. Returns True if that is a new one.

        Raises:
            EngineError: ``busy`` with requests of another loop that still runs.
        """
        loop = asyncio.get_running_loop()
        before = self._inbox.loop
        if before is loop:
            return False
        if busy and before is not None and not before.is_closed():
            raise EngineError("requests are open on another event loop: an AsyncEngine belongs to one at a time")
        self._inbox.bind(loop)
        return True

    def close(self) -> None:
        """Stop the core and free everything. Blocks for seconds at most. Idempotent; does nothing in a fork."""
        if not self._closed and self._home.here:
            self._closed = True
            self.cause = self.cause or "the engine was closed"
            self._transport.close()
            self._inbox.put(self._on_death)

    # ---- in the transport's thread

    def _receive(self, event: Event) -> None:
        match event:
            case Ready():
                self.ready = event
                self._told.set()
            case Fatal():
                if event.trace:
                    print(event.trace, file=sys.stderr)
                self._die(event)
            case _:
                self._inbox.put(self._on_event, event, counts=isinstance(event, Outputs))

    def _declare_dead(self, cause: str) -> None:
        self._die(Fatal("EngineDead", cause))

    def _die(self, fatal: Fatal) -> None:
        if self._fatal is None:
            self._fatal = fatal
            self.cause = self.cause or fatal.message
        self._told.set()
        self._inbox.put(self._on_death)
