"""Hand-off from a process that is stopped, killed, started again."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from handoff_kit import MOVERS, STAGED, answer_of, ask, begin, cancel, copy, key, keys, memory, wait_for

CHILD = """
    import json, os, signal, sys, time
    import numpy as np
    asked = json.loads(sys.argv[1])
    sys.path.insert(0, asked["kit"])
    from handoff_kit import connector, where
    from engine.core.memory import KVLayout
    from engine.core.plan import Transfer

    content = np.random.default_rng(5).integers(0, 256, (asked["pages"], 65536), dtype=np.uint8)
    store = connector(asked["mover"], {"port": asked["port"], "lease_seconds": 30})
    store.start(where())
    store.register(KVLayout((content,), "a" * 32))
    keys = tuple(n.to_bytes(32, "big") for n in range(asked["pages"]))
    store.transfer_kv([Transfer("t", "push", "r", tuple(range(asked["pages"])), keys, hints={"kv_role": "prefill"})])
    print(store.address, flush=True)
    def in_the_middle(motion):  # half of a push is written, then this process gets its signal, then the rest is
        if len(store.copy.motions) == 2 and asked["signal"]:
            address, theirs, size = motion.pieces[0]
            half = size // 2
            motion.pieces = [(address, theirs, half), (address + half, theirs + half, size - half)]
            from handoff_kit import copy
            copy(motion.pid, *motion.pieces[0], pushes=True)
            os.kill(os.getpid(), asked["signal"])
    if asked["mover"] == "pushed":
        store.copy.script = in_the_middle
        asked["after"] = float("inf")
    while True:
        store.transfer_kv([])
        if asked["signal"] and store.stats()["pages_given"] >= asked["after"]:
            os.kill(os.getpid(), asked.pop("signal"))
            asked["signal"] = 0
        time.sleep(0.0002)
"""


PAGES = 500  # of 64 KiB: far more than the kernel buffers


@pytest.fixture
def sender_process():
    """Starts a process that leases ``PAGES`` pages, and sends itself a signal after so many have been read."""
    with contextlib.ExitStack() as stack:

        def begin(mover, number=0, after=0, port=0, pages=PAGES):
            asked = json.dumps(
                {"mover": mover, "pages": pages, "port": port, "signal": int(number), "after": after, "kit": KIT}
            )
            command = [sys.executable, "-c", textwrap.dedent(CHILD), asked]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            return process, process.stdout.readline().strip()

        yield begin


KIT = str(Path(__file__).parent)
SLOT = 64  # pages: what a push, or a pull, moves at once


@pytest.fixture(params=MOVERS)
def mover(request):
    """How pages travel; where by a library, from process to process."""
    if request.param != "streamed":
        may_reach_other_processes()
    return request.param


def may_reach_other_processes():
    """Skip where the system does not let one process read another's memory, which the transport of these tests does."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = np.zeros(1, np.uint8)
        try:
            copy(child.pid, here.ctypes.data, here.ctypes.data, 1, pushes=False)
        except OSError as error:
            if error.errno == errno.EPERM:
                pytest.skip("this system does not let processes reach each other's memory")
        finally:
            child.communicate(b"\n")


def stopping(receiver, process, number):
    """The sender gets its signal while the receiver's second pull is under way."""

    def script(motion):
        if len(receiver.copy.motions) == 2:
            motion.first = lambda: os.kill(process.pid, number)

    receiver.copy.script = script


@functools.cache
def content(pages=PAGES):
    return np.random.default_rng(5).integers(0, 256, (pages, 65536), dtype=np.uint8)


def good_pages(event, upto=PAGES):
    """Pages before the first failed one."""
    return event.failed_pages[0] if event.failed_pages else upto


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "given up by itself"])
def test_b24_a_sender_that_is_stopped_and_goes_on_writes_nothing_late(cancelled, mover, opened, sender_process):
    pulls = mover in ("pulled", "direct")
    process, address = sender_process(mover, 0 if pulls else signal.SIGSTOP, after=200)
    target = memory(PAGES, (65536,))
    receiver = opened(target, mover, patience=30.0 if cancelled else 2.0)
    if pulls:
        stopping(receiver, process, signal.SIGSTOP)
    begin(receiver, "pull", keys(PAGES), range(PAGES), kv_from=address)
    start = time.monotonic()
    if cancelled:
        wait_for(lambda: receiver.stats()["pages_taken"] >= SLOT)
        time.sleep(0.3)
        start = time.monotonic()
        event = cancel(receiver)
    else:
        event = answer_of(receiver)
    assert time.monotonic() - start < (1.0 if cancelled else 2.0)
    assert event.kind == "failed"
    assert ("cancelled" if cancelled else "nothing moved for 1 seconds") in event.reason
    good = good_pages(event)
    assert SLOT <= good < PAGES
    region = target.regions[0]
    assert (region[:good] == content()[:good]).all()
    region[:] = 99  # somebody else has these pages now
    os.kill(process.pid, signal.SIGCONT)
    if mover == "pushed":
        late, staging = content()[SLOT : 2 * SLOT].reshape(-1), receiver._road._staging.area
        # A sender whose own patience ended while it was stopped may find that out first, and write nothing at all.
        until = time.monotonic() + (15.0 if cancelled else 3.0)
        while not (came := any((slot == late).all() for slot in slots(staging))) and time.monotonic() < until:
            time.sleep(0.001)
        assert came or not cancelled
    else:
        time.sleep(0.5)
    assert (region == 99).all(), "bytes landed after the transfer's end was told"
    if mover == "pushed":
        assert receiver.stats()["slots_in_limbo"] == 1
        wait_for(lambda: receiver.stats()["slots_in_limbo"] == 0, doing=lambda: pull_some(receiver, address))


def slots(staging):
    return [staging[at : at + SLOT * 65536] for at in range(0, len(staging), SLOT * 65536)]


def pull_some(receiver, address):
    """Whoever comes next asks the sender whether it is over."""
    ask(receiver, "pull", keys(4), range(4), kv_from=address)


def test_a_sender_killed_in_the_middle_leaves_whole_pages(mover, opened, sender_process):
    pulls = mover in ("pulled", "direct")
    process, address = sender_process(mover, 0 if pulls else signal.SIGKILL, after=200)
    target = memory(PAGES, (65536,))
    receiver = opened(target, mover)
    if pulls:
        stopping(receiver, process, signal.SIGKILL)
    start = time.monotonic()
    event = ask(receiver, "pull", keys(PAGES), range(PAGES), kv_from=address)
    assert (event.kind, time.monotonic() - start < 4) == ("failed", True)
    good = good_pages(event)
    assert 0 < good < PAGES
    assert (target.regions[0][:good] == content()[:good]).all()
    assert process.wait() == -signal.SIGKILL
    event = ask(receiver, "probe", [key(0)], kv_from=address)
    assert event.kind == "failed", "killed before: said at once"
    assert receiver.stats()["slots_in_limbo"] == (mover == "pushed")
    sender_process(mover, port=int(address.rpartition(":")[2]), pages=8)
    wait_for(lambda: ask(receiver, "pull", keys(8), range(8), kv_from=address).kind == "done")
    assert receiver.stats()["slots_in_limbo"] == 0, "who was to write to it is gone"


@pytest.mark.parametrize("mover", ["streamed", *STAGED], indirect=True)
def test_a_sender_started_anew_on_its_port_is_found_again_and_old_claims_are_void(mover, opened, sender_process):
    process, address = sender_process(mover, pages=8)
    receiver = opened(memory(8, (65536,)), mover)
    assert ask(receiver, "probe", keys(8), kv_from=address).tokens == 32
    process.kill()
    process.wait()
    _, again = sender_process(mover, port=int(address.rpartition(":")[2]), pages=8)
    assert again == address
    event = ask(receiver, "pull", keys(8), range(8), kv_from=address)
    assert (event.kind, event.reason) == ("failed", f"peer {address}: the peer was started anew")
    assert ask(receiver, "probe", keys(8), kv_from=address).tokens == 32
    assert ask(receiver, "pull", keys(8), range(8), kv_from=address).kind == "done"


def test_a_peer_that_failed_is_left_alone_for_a_moment_and_not_for_ever(opened, sender_process):
    port = socket.create_server(("127.0.0.1", 0))
    number = port.getsockname()[1]
    port.close()
    receiver = opened(memory(8, (65536,)))
    address = f"127.0.0.1:{number}"
    assert "Connection refused" in ask(receiver, "probe", [key(0)], kv_from=address).reason
    assert "asked again in 0." in ask(receiver, "probe", [key(0)], kv_from=address).reason
    sender_process("streamed", port=number, pages=8)
    wait_for(lambda: ask(receiver, "probe", [key(0)], kv_from=address).tokens == 4)
