"""The engine core as a process of its own: ``python -m engine.core.serve.process``, started by the client.

The boot line comes in on standard input, never on the command line (it may hold an API key). Standard input then
stays open for as long as the parent lives: its end is the parent's death, and ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback

import msgspec
import zmq

from engine.core.assemble import assemble
from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.serve.garbage import frozen
from engine.core.serve.host import Host
from engine.core.serve.messages import Boot, Command, Event, Fatal, Heartbeat, Ready, decode_command, encode, refusals
from engine.core.serve.printing import keep_printing

HEARTBEAT_SECONDS = 0.5
EXIT_REFUSED = 2  # the configuration or the model cannot be used
EXIT_CRASHED = 1
EXIT_ORPHANED = 3
FLUSH_MS = 2000


class Wire:
    """The child's ends of the two pipes. Used by the main thread only; heartbeats have a socket of their own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], boot: Boot) -> None:
        self._commands = context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, 0)
        self._commands.bind(boot.endpoint_commands)
        self._events = events_socket(context, boot)

    def emit(self, event: Event) -> None:
        """Send an event. Never blocks: the client bounds what can be open."""
        self._events.send(encode(event))

    def take(self, timeout: float | None) -> list[Command]:
        """Wait up to so many seconds (``None``: for ever) for commands; all that are there."""
        commands: list[Command] = []
        if self._commands.poll(None if timeout is None else int(timeout * 1000)):
            while True:
                try:
                    data = self._commands.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                commands += self._decoded(data)
        return commands

    def _decoded(self, data: bytes) -> list[Command]:
        """The command in ``data``. One that cannot be read is its sender's trouble, and nobody else's."""
        try:
            return [decode_command(data)]
        except msgspec.DecodeError as error:
            print(f"a command could not be read: {error}", file=sys.stderr)
            for answer in refusals(data, error):
                self.emit(answer)
            return []


def events_socket(context: zmq.Context[zmq.Socket[bytes]], boot: Boot) -> zmq.Socket[bytes]:
    """A socket that sends events to the client."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, FLUSH_MS)
    socket.connect(boot.endpoint_events)
    return socket


class Pulse(threading.Thread):
    """Sends heartbeats, also while a step or the loading of a model takes long."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], boot: Boot) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._context, self._boot = context, boot
        self._over = threading.Event()
        self.host: Host | None = None

    def run(self) -> None:
        """Beat until stopped."""
        socket = events_socket(self._context, self._boot)
        while not self._over.wait(HEARTBEAT_SECONDS):
            host = self.host
            beat = Heartbeat(host.steps, host.busy, host.advanced) if host else Heartbeat(0, False)
            socket.send(encode(beat))
        socket.close()

    def stop(self) -> None:
        """End the thread, so that its socket is closed before the context goes."""
        self._over.set()
        self.join()


def watch_parent(directory: str) -> None:
    """End this process when its standard input ends: the parent is gone, and with it everybody we work for."""
    # Not through sys.stdin: its lock, held by a thread that waits for ever, would crash the interpreter's shutdown.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


def serve(boot: Boot, wire: Wire, pulse: Pulse) -> int:
    """Build the engine and run it to its end. Returns the exit code; every failure is told to the client first."""
    try:
        core = assemble(EngineConfig.model_validate(boot.config), directory=boot.directory)
    except EngineError as error:
        wire.emit(Fatal(type(error).__name__, str(error)))
        return EXIT_REFUSED
    try:
        with frozen():
            host = Host(core, wire.emit)
            pulse.host = host
            wire.emit(Ready(core.limits, core.model, core.describe()))
            host.run(wire.take)
    finally:
        core.close()
    return 0


def main() -> int:
    """Entry point of the child process."""
    keep_printing()
    # Ctrl-C, hang-ups and supervisors reach the whole group; the parent decides when we end, and lets open requests
    # finish. Where a signal ends the parent, so does its death us: see ``watch_parent``.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=Boot)
    threading.Thread(target=watch_parent, args=(boot.directory,), name="watch-parent", daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wire, pulse = Wire(context, boot), Pulse(context, boot)
    pulse.start()
    try:
        code = serve(boot, wire, pulse)
    except BaseException as error:
        wire.emit(Fatal(type(error).__name__, str(error) or type(error).__name__, traceback.format_exc()))
        traceback.print_exc()
        code = EXIT_CRASHED
    pulse.stop()
    context.destroy(linger=FLUSH_MS)
    return code


if __name__ == "__main__":
    sys.exit(main())
