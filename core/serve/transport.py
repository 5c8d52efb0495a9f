"""Two ways to reach an engine core: a thread of this process, or a child process over ipc sockets."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from engine.core.config import MANY_KEYS, ROLE_KEYS, EngineConfig
from engine.core.errors import ConfigError, EngineError
from engine.core.serve.host import Host
from engine.core.serve.messages import Boot, Command, Event, Fatal, Heartbeat, Ready, Shutdown, decode_event, encode
from engine.core.serve.watchdog import Watchdog

POLL_SECONDS = 0.1
CLOSE_SECONDS = 10.0
LOADING_PATIENCE = 60.0  # importing torch or mapping weights may hold the interpreter for seconds

OnEvent = Callable[[Event], None]
OnDeath = Callable[[str], None]
Packed = Command | bytes
"""What ``pack`` makes and ``put`` takes: of each transport its own."""


class Transport(Protocol):
    """Carries commands to a core. Events and its death come back through callbacks, in a thread of the transport."""

    @property
    def pid(self) -> int | None:
        """Process id of the core, if it has a process of its own."""

    def pack(self, command: Command) -> Packed:
        """A command as it travels. Any thread may call it."""

    def put(self, packed: Packed) -> None:
        """Send what was packed. Never blocks; any thread may call it."""

    def close(self) -> None:
        """Stop the core and free everything. Blocks for seconds at most. Idempotent."""


class ThreadTransport:
    """The core in a thread: nothing is copied, and a crash of the core is an exception of the thread."""

    def __init__(self, config: EngineConfig, on_event: OnEvent, on_death: OnDeath, watchdog: Watchdog) -> None:
        self._config, self._on_event, self._on_death, self._watchdog = config, on_event, on_death, watchdog
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._host: Host | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._monitor = threading.Thread(target=self._watch, name="engine-watchdog", daemon=True)
        self._thread.start()
        self._monitor.start()

    @property
    def pid(self) -> int | None:
        """There is no other process."""
        return None

    def pack(self, command: Command) -> Packed:
        """The command itself."""
        return command

    def put(self, packed: Packed) -> None:
        """Queue a command."""
        assert not isinstance(packed, bytes)
        self._commands.put(packed)

    def close(self) -> None:
        """Stop the core. A step that never ends cannot be stopped in a thread: it is left behind."""
        self._closing.set()
        self._commands.put(Shutdown())
        self._thread.join(CLOSE_SECONDS)
        self._monitor.join(CLOSE_SECONDS)

    def _take(self, timeout: float | None) -> list[Command]:
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):  # empty is an answer, not a fault
            commands.append(self._commands.get(timeout=timeout) if timeout != 0 else self._commands.get_nowait())
            while True:
                commands.append(self._commands.get_nowait())
        return commands

    def _run(self) -> None:
        from engine.core.assemble import assemble

        try:
            core = assemble(self._config)
            try:
                self._host = Host(core, self._on_event)
                self._on_event(Ready(core.limits, core.model, core.describe()))
                self._host.run(self._take)
            finally:
                core.close()
        except EngineError as error:
            self._on_event(Fatal(type(error).__name__, str(error)))
        except BaseException as error:
            self._on_event(Fatal(type(error).__name__, str(error) or type(error).__name__, traceback.format_exc()))

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            host = self._host
            if host is None:
                self._watchdog.beat(0, False)
            else:
                self._watchdog.beat(host.steps, host.busy, host.advanced)
            cause = self._watchdog.verdict()
            if cause is not None:
                self._on_death(cause)
                return


class ProcessTransport:
    """The core in a child process. The child dies with us; we notice within seconds when it dies or freezes."""

    def __init__(self, config: EngineConfig, on_event: OnEvent, on_death: OnDeath, watchdog: Watchdog) -> None:
        self._on_event, self._on_death, self._watchdog = on_event, on_death, watchdog
        self._patience = watchdog.heartbeat_timeout
        self._watchdog.heartbeat_timeout = max(self._patience, LOADING_PATIENCE)
        # Only this user may enter. No TemporaryDirectory: a fork of this process that exits would remove it.
        self._directory = tempfile.mkdtemp(prefix="engine-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        boot = Boot(
            f"ipc://{self._directory}/commands", f"ipc://{self._directory}/events", self._directory,
            plain_config(config),
        )  # fmt: skip
        self._events = self._context.socket(zmq.PULL)
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.bind(boot.endpoint_events)
        # We connect and the child binds, because a socket that connects queues what it sends: it never blocks.
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        self._commands.connect(boot.endpoint_commands)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = False
        self._loaded = False
        self.process = spawn(boot)
        self._thread = threading.Thread(target=self._receive, name="engine-events", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self.process.pid

    def pack(self, command: Command) -> Packed:
        """The command, encoded."""
        return encode(command)

    def put(self, packed: Packed) -> None:
        """Send it; after ``close`` there is nobody to send to."""
        assert isinstance(packed, bytes)
        with self._lock:
            if not self._closed:
                self._commands.send(packed)

    def close(self) -> None:
        """Ask the child to stop, kill it if it does not, and remove the sockets."""
        with self._lock:
            if self._closed:
                return
            self._closing.set()
            self._commands.send(encode(Shutdown()))
            self._closed = True
        if not self._loaded:
            self.kill()  # it does not listen while it loads a model, and has nothing to finish
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._thread.join()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the child at once, also a stopped one."""
        if self.process.poll() is None:
            self.process.kill()

    def _receive(self) -> None:
        """The thread: whatever goes wrong in it is the engine's death, or clients would wait for ever."""
        try:
            self._listen()
        except BaseException as error:
            traceback.print_exc()
            self._give_up(f"what the engine sent could not be handled: {type(error).__name__}: {error}")

    def _listen(self) -> None:
        told = False
        while True:
            alive = self.process.poll() is None  # before reading: what a dead child sent is complete
            heard = self._events.poll(int(POLL_SECONDS * 1000)) != 0
            while heard:
                try:
                    self._on_message(decode_event(self._events.recv(zmq.NOBLOCK)))
                except zmq.Again:
                    break
            cause = self._watchdog.verdict() if alive else describe_exit(self.process.wait())
            if cause is not None and not told and not self._closing.is_set():
                told = True
                self._give_up(cause)
            if not alive:
                return

    def _give_up(self, cause: str) -> None:
        self.kill()
        self._on_death(cause)

    def _on_message(self, event: Event) -> None:
        if isinstance(event, Heartbeat):
            self._watchdog.beat(event.steps, event.busy, event.advanced)
            return
        if isinstance(event, Ready):
            self._loaded = True
            self._watchdog.heartbeat_timeout = self._patience
            self._watchdog.beat(0, False)
        self._on_event(event)


def spawn(boot: Boot) -> subprocess.Popen[bytes]:
    """Start the child and hand it its boot line. It finds the modules that we find, local plugins included."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.core.serve.process"],
        stdin=subprocess.PIPE,
        stdout=2,  # our standard output belongs to the command that runs here
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a child that is dead already is noticed, with its exit code, below
        process.stdin.write(msgspec.json.encode(boot) + b"\n")
        process.stdin.flush()
    return process


def plain_config(config: EngineConfig) -> dict[str, Any]:
    """A configuration as plain values that validate to an equal one (roles as tables). Raises ``ConfigError``."""
    data = config.model_dump()
    for role in ROLE_KEYS:
        data[role] = {"name": data[role]["name"], **data[role]["options"]}
    for role in MANY_KEYS:
        data[role] = [{"name": entry["name"], **entry["options"]} for entry in data[role]]
    try:
        msgspec.json.encode(data)
    except TypeError as error:
        raise ConfigError(f"options that travel to the engine process must be plain values: {error}") from error
    return data


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    return f"the engine process was killed by {signal.Signals(-code).name}"


def wait_until(condition: threading.Event, seconds: float) -> bool:
    """Wait in short pieces, so that Ctrl-C is heard."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition.wait(POLL_SECONDS):
            return True
    return False
