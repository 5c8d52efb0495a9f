"""NIXL moves the bytes: its UCX backend, over TCP or, between processes of one host, shared memory.

What version 1.5.1 was seen to do, with two processes on one host:

==========================  ============================================================================================
the sender is killed        ``NIXL_ERR_REMOTE_DISCONNECT`` at the next look; a part of the bytes has arrived
it is stopped               TCP: moving, for ever. Shared memory: the reader's kernel copies, and it is done
it goes on after ``drop``   TCP: **all bytes arrive**, also after ``remove_remote_agent``, which only makes the library
                            forget how they do. The end of the reader's agent ends it: its sockets are closed, and there
                            is no thread left that would write
it goes on, and the reader  TCP: UCX **aborts the sender's process** ("Endpoint timeout") or it crashes, while it
has died meanwhile          answers a READ that came before. A WRITE to a target in that state does no harm
``release`` under way       returns at once, without an error
the peer unregistered it    the READ succeeds; where the memory is also unmapped, TCP crashes the peer
pieces out of range         refused before anything moves (``NIXL_ERR_NOT_FOUND``)
a name that is known        another process's card: refused. The same card again: fine
16384 pieces                fine
several threads             with ``STRICT`` an agent takes one call at a time; over shared memory a call is the copy
the agent's own thread      looks without a pause, which takes a whole processor; with a pause of 1 ms it takes 3 %,
                            and the bytes are as fast
==========================  ============================================================================================

Errors are exceptions; the state ``ERR`` was never seen. Importing the library silences ``logging``'s own complaints in
the whole process and brings a handler for SIGHUP; both are kept from happening.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError
from engine.plugins.connectors._pieces import spans
from engine.plugins.connectors._transport import Motion, Transport, TransportError, Words

log = logging.getLogger(__name__)

MODULES = ("nixl._api", "nixl_cu12._api")
HINT = "connector nixl needs nixl: pip install 'sixhooks[nixl]'"
QUIET = {"UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "NIXL_LOG_LEVEL": "ERROR"}
PAUSE = 1000  # microseconds between two looks of an agent's thread while nothing moves
_once = threading.Lock()


def library() -> Any:
    """The library's module; the environment that it reads at this moment is set first. Raises ``ConfigError``."""
    for name in MODULES:
        complains = logging.raiseExceptions
        try:
            with _once, _environment(QUIET):
                return import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(f"connector nixl: the library cannot be loaded: {error}") from error
        finally:
            logging.raiseExceptions = complains
    raise ConfigError(HINT)


class NixlTransport(Transport):
    """Pull: READs from the peer's memory.

    Args:
        tls: UCX's transports. ``UCX_TLS`` of the environment goes first.
        devices: network devices that UCX may use and listens on, e.g. ``lo``; empty: all. ``UCX_NET_DEVICES`` of the
            environment goes first.

    Raises:
        ConfigError: the library is not installed, or cannot be loaded.
    """

    name: ClassVar[str] = "nixl"
    failed_is_final: ClassVar[bool] = True  # the library says so when the connection is gone
    operation: ClassVar[str] = "READ"

    def __init__(self, tls: str = "tcp,shm,self", devices: str = "") -> None:
        self._library = library()
        self._environment = {**QUIET, "UCX_TLS": tls, **({"UCX_NET_DEVICES": devices} if devices else {})}
        self._agent: Any = None
        self._registered: Any = None
        self._lock = threading.Lock()  # of the books; the library has its own
        self._remotes: dict[str, _Remote] = {}
        self._left: list[_Remote] = []  # disconnected, with motions that have not ended

    def open(self, memory: Sequence[NDArray[np.uint8]]) -> str:
        """An agent of its own, under a name that nobody has: the library refuses a second one with a name it knows."""
        api = self._library
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        name = f"sixhooks-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with _once, _environment(self._environment), _unhurried(api):
                self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], sync_mode=sync))
            held = [(start, length, 0, "") for start, length in spans(memory)]
            self._registered = self._agent.register_memory(held, "DRAM") if held else None
            return base64.b64encode(self._agent.get_agent_metadata()).decode()
        except Exception as error:  # the library's own have no base
            raise TransportError(f"nixl: {_words(error)}") from error

    def connect(self, peer: str, card: str) -> None:
        """Another card of a peer replaces what was known of it. Of threads that connect at once the first is right:
        the library knows a peer once, and forgets it when none of its motions is open."""
        with self._lock:
            if self._knows(peer, card):
                return
            other = peer in self._remotes
        if other:
            self.disconnect(peer)
        try:
            said = self._agent.add_remote_agent(base64.b64decode(card))
            name = said.decode() if isinstance(said, bytes) else str(said)
            self._agent.make_connection(name)
        except Exception as error:
            raise TransportError(f"nixl: peer {peer}: {_words(error)}") from error
        with self._lock:
            if not self._knows(peer, card):
                self._remotes[peer] = _Remote(name, card)

    def disconnect(self, peer: str) -> None:
        """What the peer was asked for arrives all the same. Its open motions go on to say the truth: the library is
        told to forget the peer when they have ended, since it would not know their end otherwise."""
        with self._lock:
            remote = self._remotes.pop(peer, None)
            if remote is not None:
                self._left.append(remote)
        self._sweep()

    def begin(self, peer: str, ours: Words, theirs: Words, lengths: Words) -> NixlMotion:
        """Over shared memory this is the whole copy; over TCP it is done by UCX's thread."""
        with self._lock:
            remote = self._remotes.get(peer)
            if remote is None:
                raise TransportError(f"nixl: peer {peer} is not connected")
            motion = NixlMotion(self, remote)
            remote.motions.add(motion)  # from now on the library does not forget the peer
        agent = self._agent
        try:
            here, there = (agent.get_xfer_descs(_pieces(places, lengths), "DRAM") for places in (ours, theirs))
            handle = motion.handle = agent.initialize_xfer(self.operation, here, there, remote.name)
        except Exception as error:
            motion.drop()
            raise TransportError(f"nixl: {_words(error)}") from error
        motion.look(lambda: agent.transfer(handle))
        return motion

    def close(self) -> None:
        """End the agent and its thread: from here on nothing is written any more, whatever peers still send."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with self._lock:
            remotes = [*self._remotes.values(), *self._left]
            self._remotes, self._left = {}, []
        for motion in [motion for remote in remotes for motion in remote.motions]:
            motion.drop()
        if self._registered is not None:
            try:
                agent.deregister_memory(self._registered)
            except Exception as error:
                log.warning("nixl: memory could not be unregistered: %s", _words(error))

    def _knows(self, peer: str, card: str) -> bool:
        """Whether the peer is connected by this card, or was and can be again. Whoever calls has the lock. Mutates."""
        known = self._remotes.get(peer)
        if known is None and (left := next((one for one in self._left if one.card == card), None)) is not None:
            self._left.remove(left)
            known = self._remotes[peer] = left
        return known is not None and known.card == card

    def _sweep(self) -> None:
        """Have the library forget those whose motions have all ended."""
        with self._lock:
            done = [remote for remote in self._left if not remote.motions]
            self._left = [remote for remote in self._left if remote.motions]
            agent = self._agent
        for remote in done if agent is not None else ():
            try:
                agent.remove_remote_agent(remote.name)
            except Exception as error:  # it has noticed already that the peer is gone
                log.debug("nixl: peer %s could not be removed: %s", remote.name, _words(error))


class NixlPushTransport(NixlTransport):
    """Push: WRITEs into the peer's memory. What is stopped and goes on cannot be hurt by the other side's end."""

    pushes: ClassVar[bool] = True
    failed_is_final: ClassVar[bool] = False  # the target's kernel may hold bytes that the target has not read yet
    operation: ClassVar[str] = "WRITE"


class NixlMotion(Motion):
    """One of the library's transfers. ``handle``: the library's own, as long as there is one."""

    def __init__(self, transport: NixlTransport, remote: _Remote) -> None:
        self._transport, self._remote = transport, remote
        self.handle: Any = None
        self._state: Literal["moving", "done", "failed"] = "moving"

    def state(self) -> Literal["moving", "done", "failed"]:
        """Ask the library."""
        if self._state != "moving":
            return self._state
        agent = self._transport._agent
        if self.handle is None or agent is None:
            return self._end("failed", "it was dropped")
        return self.look(lambda: agent.check_xfer_state(self.handle))

    def look(self, ask: Any) -> Literal["moving", "done", "failed"]:
        """Learn the state from what the library answers to ``ask``."""
        try:
            said = ask()
        except Exception as error:
            return self._end("failed", _words(error))
        if said == "PROC":
            return "moving"
        return self._end("done") if said == "DONE" else self._end("failed", f"the library says {said}")

    def drop(self) -> None:
        """Release the handle, under way or not."""
        handle, self.handle = self.handle, None
        if handle is not None:
            try:
                handle.release()
            except Exception as error:  # under way, and the backend cannot cancel: the agent's end frees it
                log.debug("nixl: a transfer could not be released: %s", _words(error))
        if self._state == "moving":
            self._end("failed", "it was dropped")

    def _end(self, state: Literal["done", "failed"], reason: str = "") -> Literal["done", "failed"]:
        self._state, self.reason = state, reason and f"nixl: {reason}"
        with self._transport._lock:
            self._remote.motions.discard(self)
            last = not self._remote.motions and self._remote in self._transport._left
        if last:
            self._transport._sweep()
        return state


class _Remote:
    """A peer's agent."""

    def __init__(self, name: str, card: str) -> None:
        self.name, self.card = name, card
        self.motions: set[NixlMotion] = set()  # that have not ended


def _pieces(places: Words, lengths: Words) -> NDArray[np.uint64]:
    """As the library takes them: ``[n, 3]`` of address, bytes, device."""
    out = np.zeros((len(places), 3), np.uint64)
    out[:, 0], out[:, 1] = places, lengths
    return out


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


@contextmanager
def _unhurried(api: Any) -> Iterator[None]:
    """Agents made inside look with a pause: their constructor leaves no choice, and their configuration has one."""
    bindings = api.nixlBind
    plain = bindings.nixlAgentConfig

    def configured() -> Any:
        made = type("Configuration", (plain,), {"pthrDelay": property(plain.pthrDelay.__get__, _nothing)})()
        plain.pthrDelay.__set__(made, PAUSE)
        return made

    bindings.nixlAgentConfig = configured
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


def _nothing(_: Any, __: Any) -> None:
    """What the constructor sets does not count."""


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that the user has not set are set inside; children and other users of UCX do not see them."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
