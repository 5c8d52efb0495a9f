"""Libraries that move bytes, each against another process: what arrives, and what faults of the other side do."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from handoff_kit import wait_for

from engine.core import ConfigError
from engine.core.memory import SharedMemory
from engine.plugins.connectors._pieces import spans, within
from engine.plugins.connectors._shared import SLICE, SharedTransport
from engine.plugins.connectors._transport import TransportError

HERE = pathlib.Path(__file__).parent
PEER = HERE / "_transport_peer.py"
spec = importlib.util.spec_from_file_location("_transport_peer", PEER)
side = importlib.util.module_from_spec(spec)
spec.loader.exec_module(side)
SIZE = 2 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


def words(values) -> np.ndarray:
    return np.asarray(values, np.uint64)


class Peer:
    """The other process."""

    def __init__(self, which: str, size: int = SIZE, fill: int = 0) -> None:
        command = [sys.executable, str(PEER), which, str(size), str(fill)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while not (line := self.process.stdout.readline()).startswith("["):
            assert line, "the other side did not start"
        self.card, self.address = json.loads(line)

    def ask(self, question: str) -> str:
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Here:
    """This process's side: a transport, its memory, and motions with a peer."""

    def __init__(self, which: str, size: int = SIZE, fill: int = 0) -> None:
        try:
            self.transport, self.memory, (self.shared,) = side.made(which, size, fill)
        except ConfigError as error:
            pytest.skip(str(error))
        self.card = self.transport.open([self.memory])
        self.address = self.memory.ctypes.data

    def begin(self, peer: Peer, ours, theirs, lengths, name="peer"):
        return self.transport.begin(
            name, words(ours) + words(self.address), words(theirs) + words(peer.address), words(lengths)
        )

    def move(self, peer: Peer, ours, theirs, lengths, name="peer") -> None:
        """All of it, in motions of as many pieces as are allowed."""
        for at in range(0, len(ours), self.transport.most):
            part = slice(at, at + self.transport.most)
            motion = self.begin(peer, ours[part], theirs[part], lengths[part], name)
            end(motion)
            motion.drop()

    def close(self) -> None:
        self.transport.close()
        if self.shared is not None:
            os.close(self.shared.fd)


def end(motion, wanted="done") -> None:
    state = wait_for(lambda: (now := motion.state()) != "moving" and now, 60)
    assert (state, motion.reason if state == "failed" and wanted == "done" else "") == (wanted, "")


@pytest.fixture(params=side.WHICH)
def which(request):
    if request.param == "shared" and sys.platform != "linux":
        pytest.skip("memory is shared on Linux only")
    return request.param


@pytest.fixture
def pair(which):
    """Makes this side, and peers; ends both, with threads and file descriptors as before."""
    with contextlib.ExitStack() as stack:
        yield Pair(which, stack)
    gc.collect()


class Pair:
    def __init__(self, which: str, stack: contextlib.ExitStack) -> None:
        self.which, self._stack = which, stack

    def here(self, fill=0, size=SIZE) -> Here:
        one = Here(self.which, size, fill)
        self._stack.callback(one.close)
        return one

    def peer(self, fill=0, size=SIZE) -> Peer:
        one = Peer(self.which, size, fill)
        self._stack.callback(one.kill)
        return one

    def connected(self, mine=0, theirs=0):
        here = self.here(mine)
        peer = self.peer(theirs)
        here.transport.connect("peer", peer.card)
        return here, peer

    def under_way(self, mine, theirs):
        """All memory is to move, and the peer, with whom bytes were exchanged before, is stopped."""
        here, peer = self.connected(mine, theirs)
        here.move(peer, [0], [0], [64])
        pieces = np.arange(0, SIZE, 1 << 16)
        peer.stop()
        return here, peer, here.begin(peer, pieces, pieces, [1 << 16] * len(pieces))


def scattered(piece: int, count: int, seed: int, size=SIZE) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size // piece)[:count] * piece


def test_bytes_are_equal_and_nothing_else_is_written(pair):
    """Pieces of 16 KiB and odd ones, more of them than one motion may have; then from four threads at once."""
    here, peer = pair.connected()
    peer.ask("pattern 1")
    here.memory[:] = np.random.default_rng(2).integers(0, 256, SIZE, np.uint8)
    theirs = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    ours = here.memory.copy()
    source, target = (ours, theirs) if here.transport.pushes else (theirs, ours)
    for piece, count in ((16384, 100), (500, 2500), (3, 3)):
        a, b = scattered(piece, count, 3), scattered(piece, count, 4)
        here.move(peer, a, b, [piece] * count)
        for mine, other in zip(a, b, strict=True):
            to, of = (other, mine) if here.transport.pushes else (mine, other)
            target[to : to + piece] = source[of : of + piece]
    assert (here.memory == ours).all()
    assert int(peer.ask("digest")) == int(theirs.view(np.uint64).sum())
    half = SIZE // 2
    slots = np.split(np.arange(0, half, 4096), 4)
    errors: list = []

    def some(part):
        try:
            here.move(peer, part, part + half, [4096] * len(part))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=some, args=(part,)) for part in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    if here.transport.pushes:
        theirs[half:] = ours[:half]
    else:
        ours[:half] = theirs[half:]
    assert (here.memory == ours).all()
    assert int(peer.ask("digest")) == int(theirs.view(np.uint64).sum())


def test_pieces_out_of_range_are_refused_and_the_peer_lives(pair):
    here, peer = pair.connected(mine=1, theirs=2)
    before = here.memory.copy()
    for ours, theirs in ((0, SIZE), (0, SIZE - 100), (SIZE, 0), (SIZE - 100, 0)):
        with contextlib.suppress(TransportError):
            motion = here.begin(peer, [ours], [theirs], [4096])
            end(motion, "failed")
            assert motion.reason
            motion.drop()
    assert (here.memory == before).all()
    assert peer.ask("count 2") == str(SIZE)
    here.move(peer, [0], [0], [4096])


def test_who_is_not_connected_is_said(pair):
    here, peer = pair.connected()
    here.transport.connect("peer", peer.card)
    motion = here.begin(peer, [0], [0], [4096])
    end(motion)
    motion.drop()
    motion.drop()
    assert motion.state() == "done"
    here.transport.disconnect("peer")
    here.transport.disconnect("peer")
    here.transport.disconnect("nobody")
    with pytest.raises(TransportError, match="peer is not connected"):
        here.begin(peer, [0], [0], [4096])
    here.transport.connect("peer", peer.card)
    here.move(peer, [0], [0], [4096])
    for nonsense in ("", "nonsense", "{}"):
        with pytest.raises(TransportError):
            here.transport.connect("other", nonsense)


def test_a_killed_peer_fails_what_is_under_way_and_a_new_one_takes_its_place(pair):
    """The same name with another card: an engine that was started anew."""
    here, peer, motion = pair.under_way(mine=5, theirs=6)
    peer.kill()
    if pair.which in ("shared", "nixl-shm"):  # the processor copies: it needs nobody
        end(motion)
        assert (here.memory == 6).all()
    else:
        end(motion, "failed")
        assert motion.reason
    motion.drop()
    new = pair.peer(fill=7)
    here.transport.connect("peer", new.card)
    here.move(new, [0], [4096], [4096])
    if here.transport.pushes:
        assert new.ask("count 5") == "4096"
    else:
        assert (here.memory[:4096] == 7).all()


def test_a_peer_that_was_killed_before_is_found_out(pair):
    here, peer = pair.connected(mine=5)
    here.move(peer, [0], [0], [4096])
    peer.kill()
    if pair.which == "shared":
        here.move(peer, [0], [0], [4096])  # what was mapped stays
        here.transport.disconnect("peer")
        with pytest.raises(TransportError, match="cannot be opened: No such file"):
            here.transport.connect("peer", peer.card)
        return
    with contextlib.suppress(TransportError):
        motion = here.begin(peer, [0], [0], [4096])
        end(motion, "failed")
        motion.drop()


@pytest.mark.parametrize("which", ["shared", "nixl", "nixl-push", "mooncake"])
def test_what_a_stopped_peer_still_writes(pair):
    """Bytes of a motion that was dropped arrive where a transport says that it has late writes, and nowhere else.

    Where this fails because nothing arrives, the library has become better than its transport says.
    """
    here, peer, motion = pair.under_way(mine=1, theirs=2)
    time.sleep(0.2)
    motion.drop()
    here.transport.disconnect("peer")
    if not here.transport.late_writes:
        time.sleep(0.2)
        peer.go_on()
        assert peer.ask("count 2") == str(SIZE)
        assert (here.memory[64:] == 1).all()
        return
    peer.go_on()
    if here.transport.pushes:
        wait_for(lambda: peer.ask("count 1") == str(SIZE), 20)
    else:
        wait_for(lambda: (here.memory == 2).all(), 20)


@pytest.mark.parametrize("which", ["nixl", "nixl-push", "mooncake"])
@pytest.mark.parametrize("then", ["goes on", "is killed"])
def test_a_motion_says_the_truth_after_its_peer_was_disconnected(then, pair):
    """A slot of a staging area is free again when its motion has ended: that must be seen."""
    here, peer, motion = pair.under_way(mine=1, theirs=2)
    time.sleep(0.1)
    here.transport.disconnect("peer")
    assert motion.state() == "moving"
    with pytest.raises(TransportError, match="not connected"):
        here.begin(peer, [0], [0], [64])
    if then == "goes on":
        peer.go_on()
        end(motion)
        assert here.transport.pushes or (here.memory == 2).all()
        here.transport.connect("peer", peer.card)
        here.move(peer, [0], [0], [64])
    else:
        peer.kill()
        end(motion, "failed")
    motion.drop()


@pytest.mark.parametrize("which", ["nixl", "mooncake"])
def test_threads_that_connect_at_once_share_what_is_known_of_the_peer(pair):
    """Else a motion of the one is open while the library is told, for the other, to forget the peer."""
    here, peer = pair.here(), pair.peer()
    transport, barrier, seen = here.transport, threading.Barrier(4), []

    def connect():
        barrier.wait()
        transport.connect("peer", peer.card)
        seen.append(getattr(transport, "_remotes" if pair.which == "nixl" else "_peers")["peer"])

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4
    assert len(set(map(id, seen))) == 1
    here.move(peer, [0], [0], [4096])


@pytest.mark.parametrize("which", ["nixl"])
def test_nothing_is_written_after_close(pair):
    here, peer, motion = pair.under_way(mine=1, theirs=2)
    here.transport.close()
    assert motion.state() == "failed"
    peer.go_on()
    time.sleep(0.5)
    assert (here.memory[64:] == 1).all()


def test_nothing_is_left_open(which):
    one = Here(which, 1 << 16)
    one.close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    for _ in range(3):
        one = Here(which, 1 << 16)
        one.close()
        one.transport.close()
        del one
        gc.collect()
    wait_for(lambda: (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) <= before, 20)


@pytest.mark.parametrize("which", ["nixl", "mooncake"])
def test_nothing_is_computed_while_nothing_moves(which):
    """The library's own thread takes no processor: NIXL's looks without a pause, if it is not told otherwise."""
    one = Here(which, 1 << 16)
    time.sleep(0.2)
    begun = time.process_time()
    time.sleep(1.0)
    used = time.process_time() - begun
    one.close()
    assert used < 0.1


# ---- libraries that are missing


@pytest.mark.parametrize(
    ("module", "missing", "hint"),
    [
        ("_nixl", ("nixl._api", "nixl_cu12._api"), r"needs nixl: pip install 'sixhooks\[nixl\]'"),
        ("_mooncake", ("mooncake.engine",), r"needs mooncake: pip install 'sixhooks\[mooncake\]'"),
    ],
)
def test_what_to_install_is_said(module, missing, hint, monkeypatch):
    plugin = __import__(f"engine.plugins.connectors.{module}", fromlist=["library"])
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=hint):
        plugin.library()


def test_mooncake_without_its_own_library(monkeypatch, tmp_path):
    """As the loader says it where a shared library is missing."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    words = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "mooncake" / "engine.py").write_text(f"raise ImportError({words!r})")
    script = "from engine.plugins.connectors._mooncake import library\nlibrary()"
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert "needs libibverbs, also where there is no RDMA: apt-get install libibverbs1" in run.stderr


@pytest.mark.parametrize("which", ["nixl"])
def test_memory_that_the_library_does_not_take_is_said_and_nothing_stays_open(which, monkeypatch):
    try:
        transport, memory, _ = side.made(which, SIZE, 0)
    except ConfigError as error:
        pytest.skip(str(error))

    def refuse(*_):
        raise RuntimeError("no memory may be locked")

    monkeypatch.setattr(transport._library.nixl_agent, "register_memory", refuse)
    with pytest.raises(TransportError, match="no memory may be locked"):
        transport.open([memory])
    transport.close()


def test_nixl_leaves_the_environment_as_it_was():
    from engine.plugins.connectors import _nixl

    try:
        transport = _nixl.NixlTransport(devices="lo")
    except ConfigError as error:
        pytest.skip(str(error))
    import logging

    def caught() -> bool:
        """Whether this process has a handler of SIGHUP, Python's or another (its library's first import brings one)."""
        if sys.platform != "linux":
            return False
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        return bool(int(next(line for line in status if line.startswith("SigCgt")).split()[1], 16) & 1)

    handler, complains, catches = signal.getsignal(signal.SIGHUP), logging.raiseExceptions, caught()
    before = {name: value for name, value in os.environ.items() if name.startswith(("UCX", "NIXL"))}
    transport.open([np.zeros(64, np.uint8)])
    transport.close()
    assert {name: value for name, value in os.environ.items() if name.startswith(("UCX", "NIXL"))} == before
    assert logging.raiseExceptions == complains
    assert signal.getsignal(signal.SIGHUP) == handler
    assert caught() == catches, "a C handler of SIGHUP"


# ---- memory that is shared


@pytest.fixture
def ours():
    one = Here("shared")
    yield one
    one.close()


def changed(card: str, **values) -> str:
    return json.dumps({**json.loads(card), **values})


@LINUX
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pid": 2**22 + 1}, "cannot be opened: No such file"),
        ({"fd": 0}, "another file"),
        ({"inode": 1}, "another file"),
        ({"size": 1 << 16}, "another file"),
        ({"mark": "00" * 32}, "not the peer's"),
        ({"mark": ""}, "not the peer's"),
        ({"mark": "xyz"}, "makes no sense"),
        ({"pid": "../1"}, "makes no sense"),
        ({"size": -1}, "makes no sense"),
        ({"start": True}, "makes no sense"),
    ],
)
def test_the_right_file_or_none(values, reason, ours):
    with pytest.raises(TransportError, match=reason):
        ours.transport.connect("peer", changed(ours.card, **values))


@LINUX
def test_a_file_that_could_become_shorter_is_not_mapped(ours):
    """Reading beyond its end would kill the process."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 1 << 16)
        state = os.fstat(fd)
        card = changed(ours.card, fd=fd, inode=state.st_ino, device=state.st_dev, size=1 << 16)
        with pytest.raises(TransportError, match="could make the file shorter"):
            ours.transport.connect("peer", card)
    finally:
        os.close(fd)
    seals = fcntl.fcntl(ours.shared.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK


@LINUX
def test_memory_elsewhere_is_its_owners_alone(ours):
    """Not in the file, or no file at all: the card is empty, and peers go another way."""
    elsewhere = SharedTransport(ours.shared)
    assert elsewhere.open([ours.memory, np.zeros(64, np.uint8)]) == ""
    assert SharedTransport(None).open([ours.memory]) == ""
    shorter = dataclasses.replace(ours.shared, size=1 << 16)
    assert SharedTransport(shorter).open([ours.memory]) == ""
    assert isinstance(ours.shared, SharedMemory)
    with pytest.raises(TransportError, match="its own"):
        ours.transport.connect("peer", "")


@LINUX
def test_a_copy_is_done_in_slices_and_ends_when_it_is_dropped():
    size = SLICE + 4096
    ours, peer = Here("shared", size), Here("shared", size, 3)
    try:
        ours.transport.connect("peer", peer.card)
        motion = ours.transport.begin("peer", words([ours.address]), words([peer.address]), words([size]))
        assert not ours.memory.any()
        assert motion.state() == "moving"
        assert (ours.memory[:SLICE] == 3).all()
        assert not ours.memory[SLICE:].any()
        motion.drop()
        assert motion.state() == "failed"
        assert not ours.memory[SLICE:].any()
        view = ours.transport._peers["peer"]._memory
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    finally:
        ours.close()
        peer.close()


# ---- arithmetic


def test_spans_join_what_touches():
    whole = np.zeros(100, np.uint8)
    start = whole.ctypes.data
    assert spans([whole[40:], whole[:20], whole[20:40], whole[:0]]) == [(start, 100)]
    assert spans([whole[60:], whole[:50], whole[10:20]]) == [(start, 50), (start + 60, 40)]
    with pytest.raises(ValueError, match="contiguous"):
        spans([whole[::2]])


@pytest.mark.parametrize(
    ("place", "length", "inside"),
    [(100, 50, True), (100, 51, False), (99, 1, False), (149, 1, True), (150, 0, True), (160, 5, False), (0, 1, False),
     (200, 10, True), (2**64 - 1, 1, False), (120, 2**64 - 1, False), (205, 6, False)],
)  # fmt: skip
def test_within(place, length, inside):
    assert within(words([place]), words([length]), [(100, 50), (200, 10)]) is inside
    assert within(words([100, place]), words([50, length]), [(100, 50), (200, 10)]) is inside
    assert not within(words([place]), words([length]), [])
