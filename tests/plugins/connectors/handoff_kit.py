"""What tests of hand-offs share: memory whose bytes are known, transfers by hand, and a transport that fails as told.

Child processes of the tests import it too.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.core import ModelInfo, SamplingParams
from engine.core.memory import KVLayout
from engine.core.plan import Transfer
from engine.core.registry import make
from engine.plugins.connectors._handoff import HandOffConnector
from engine.plugins.connectors._handoff_options import StagedOptions
from engine.plugins.connectors._transport import Motion, Transport, TransportError
from engine.testing import ShadowExecutor, make_core

MOVERS = ("streamed", "pulled", "direct", "pushed")
STAGED = ("pulled", "pushed")
COMBINATIONS = list(itertools.product(("unified", "radix"), ("paged", "radix"), (False, True)))
PROMPT = [at % 97 for at in range(30)]
PREFILL = {"kv_role": "prefill"}


# ---- a transport that copies, within this process or between two, and does what it is told


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


def copy(pid, ours, theirs, size, *, pushes):
    """Copy between this process's memory and another's. Raises ``OSError``."""
    if pid == os.getpid():
        ctypes.memmove(*((theirs, ours) if pushes else (ours, theirs)), size)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_writev if pushes else libc.process_vm_readv
    here, there = Vector(ours, size), Vector(theirs, size)
    done = call(pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0))
    if done != size:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class CopyMotion(Motion):
    """A copy that is made when somebody looks, or when the test says so.

    Attributes, for the test to set when it begins:
        held: an event; nothing moves before it is set.
        failing: after so many pieces it fails.
        first: called before anything is copied.
    """

    def __init__(self, transport, pid, pieces):
        self.transport, self.pid, self.pieces = transport, pid, pieces
        self.held = self.failing = self.first = None
        self.dropped = False
        self._lock = threading.Lock()
        self._state = "moving"

    def state(self):
        if self._state == "moving" and (self.held is None or self.held.is_set()):
            self.land()
        return self._state

    def land(self):
        """Copy, also if nobody looks any more: that is a late write. Once."""
        with self._lock:
            if self._state == "moving":
                self._copy()

    def _copy(self):
        if self.first is not None:
            self.first()
        try:
            for number, piece in enumerate(self.pieces):
                if number == self.failing:
                    raise OSError(0, "as it was told to")
                copy(self.pid, *piece, pushes=self.transport.pushes)
        except OSError as error:
            self._state, self.reason = "failed", error.strerror
        else:
            self._state = "done"

    def drop(self):
        self.dropped = True


class Copy(Transport):
    """Attributes: ``motions``, all that were begun; ``script``, called with each of them; ``down``, words: why it does
    not connect."""

    name = "copy"
    most = 64

    def __init__(self, mover, *, failed_is_final=True):
        self.pushes = mover == "pushed"
        self.late_writes = mover != "direct"
        self.failed_is_final = failed_is_final
        self.motions: list[CopyMotion] = []
        self.script = lambda motion: None
        self.down = ""
        self.peers: dict[str, int] = {}
        self.closed = False

    def open(self, memory):
        if self.down == "at all":
            raise TransportError("no such device")
        self.memory = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in memory]
        return str(os.getpid())

    def connect(self, peer, card):
        if self.down:
            raise TransportError(self.down)
        self.peers[peer] = int(card)

    def disconnect(self, peer):
        self.peers.pop(peer, None)

    def begin(self, peer, ours, theirs, lengths):
        if peer not in self.peers:
            raise TransportError("who is that?")
        assert 0 < len(lengths) <= self.most
        pieces = list(zip(ours.tolist(), theirs.tolist(), lengths.tolist(), strict=True))
        reachable = self.memory if self.pushes or not self.late_writes else self.memory[-1:]  # else: the staging area
        for address, _, size in pieces:
            assert any(low <= address and address + size <= high for low, high in reachable)
        motion = CopyMotion(self, self.peers[peer], pieces)
        self.motions.append(motion)
        self.script(motion)
        return motion

    def close(self):
        assert self.closed or all(motion.dropped for motion in self.motions)
        self.closed = True


class Copied(HandOffConnector):
    """A connector over ``Copy``."""

    name = "copied"

    class Options(StagedOptions):
        mover: Literal["pulled", "direct", "pushed"] = Field("pulled", description="how pages travel")
        down: str = Field("", description="why it does not work")
        final: bool = Field(True, description="whether a motion that failed writes nothing any more")

    def transport_factory(self):
        self.copy = Copy(self.options.mover, failed_is_final=self.options.final)
        self.copy.down = self.options.down
        return self.copy


class Either(Copied):
    """Over ``Copy``, or over the line where that does not work."""

    name = "either"
    streams = True


def connector(mover, options=None):
    """A connector whose pages travel so, over ``Copy`` where not streamed."""
    if mover == "streamed":
        return make("connector", "local", {"shared": False, **(options or {})})
    name, _, mover = mover.rpartition(" ")
    return make("connector", f"handoff_kit:{name or 'Copied'}", {"mover": mover, **(options or {})})


# ---- a connector alone, over memory whose bytes are known


def memory(pages=12, sizes=(48, 16), digest="a" * 32, seed=0) -> KVLayout:
    rng = np.random.default_rng(seed)
    return KVLayout(tuple(rng.integers(0, 256, (pages, size), dtype=np.uint8) for size in sizes), digest)


def where(page_size=4, fingerprint="f"):
    model = ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint=fingerprint)
    return SimpleNamespace(limits=SimpleNamespace(page_size=page_size), model=model)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> tuple[bytes, ...]:
    """Keys of a range."""
    return tuple(map(key, range(*numbers)))


def wait_for(what, seconds=15.0, doing=lambda: None):
    until = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < until, "it takes too long"
        doing()
        time.sleep(0.001)
    return answer


def answer_of(store, name="t"):
    """The event that ends a transfer."""
    return wait_for(lambda: next((e for e in store.transfer_kv([]) if e.transfer_id == name), None))


def begin(store, kind, keys=(), pages=(), name="t", request="r", **hints):
    """One transfer; what has ended meanwhile."""
    return store.transfer_kv([Transfer(name, kind, request, tuple(pages), tuple(keys), hints=hints)])


def ask(store, kind, keys=(), pages=(), name="t", request="r", **hints):
    """One transfer, and the event that ends it."""
    events = begin(store, kind, keys, pages, name, request, **hints)
    return events[0] if events else answer_of(store, name)


def cancel(store, name="t", request="r"):
    """Nobody waits for a transfer any more; the event that ends it."""
    events = store.transfer_kv([Transfer(f"cancel {name}", "cancel", request, of=name)])
    return events[0] if events else answer_of(store, name)


def lease(store, keys, pages, name="p", request="r"):
    assert list(store.transfer_kv([Transfer(name, "push", request, tuple(pages), tuple(keys), hints=PREFILL)])) == []


# ---- whole engines


def engine(
    mover="streamed", scheduler="unified", kvcache="paged", overlap=False, executor=None, options=None, **settings
):
    store = connector(mover, options)
    settings = {"num_pages": 40, "page_size": 4, "max_batch_tokens": 16, **settings}
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, overlap=overlap, connectors=[store],
        executor=executor or ShadowExecutor(), **settings,
    )  # fmt: skip
    core.store = store
    return core


def settle(*cores, seconds=20.0):
    """Step all of them until there is nothing to do; nobody has read a wrong page, and every page is free."""
    until = time.monotonic() + seconds
    while any(core.has_work for core in cores):
        assert time.monotonic() < until, [core.stats() for core in cores]
        for core in cores:
            core.step()
    for core in cores:
        core.check()
        assert core.executor.mismatch is None
        assert core.counters.stray_events == 0
        assert core.pool.num_fenced == 0
        assert core.pool.num_free + core.kv.numbers().evictable == core.pool.num_pages


def prefill(core, tokens=PROMPT, **fields):
    """A request that ends with its prompt; its pages are leased when this returns."""
    request = core.add(tokens, SamplingParams(max_tokens=1), metadata=PREFILL, **fields)
    while not request.finished:
        core.step()
    core.step()
    return request


def close(*cores):
    for core in cores:
        core.close()


def threads_left():
    """Threads of hand-offs that have not ended."""
    names = ("engine-local", "engine-copied", "engine-either")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]
