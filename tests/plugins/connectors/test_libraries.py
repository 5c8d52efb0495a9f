"""Hand-off with the real libraries, from process to process: the same cases for every way in which pages travel.

Where a library is not installed its cases are skipped, and say what to install.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from handoff_kit import PROMPT, ask, begin, close, keys, settle, wait_for, where

from engine.core import ConfigError, SamplingParams
from engine.core.memory import KVLayout
from engine.core.registry import make
from engine.plugins.executors._memfd import MARK, shared_file
from engine.testing import ConnectorSuite, ShadowExecutor, make_core

LO = {"tls": "tcp,self", "devices": "lo"}
WAYS = {
    "shared": ("local", {}),
    "streamed": ("local", {"shared": False}),
    "nixl": ("nixl", LO),
    "nixl push": ("nixl", {**LO, "style": "push"}),
    "mooncake": ("mooncake", {}),
}
PAGE = 65536
SLOT = 64  # pages that travel at once: a slot of 4 MiB

CHILD = """
    import json, os, sys, time
    from types import SimpleNamespace
    import numpy as np
    from engine.core import ModelInfo
    from engine.core.memory import KVLayout
    from engine.core.plan import Transfer
    from engine.core.registry import make
    from engine.plugins.executors._memfd import MARK, shared_file

    asked = json.loads(sys.argv[1])
    shape = asked["pages"], asked["size"]
    shared, mapped = shared_file(shape[0] * shape[1] + MARK) or (None, bytearray(shape[0] * shape[1] + MARK))
    content = np.frombuffer(mapped, np.uint8, offset=MARK).reshape(shape)
    content[:] = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    store = make("connector", asked["name"], {"lease_seconds": 30, **asked["options"]})
    model = ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint="f")
    store.start(SimpleNamespace(limits=SimpleNamespace(page_size=4), model=model))
    store.register(KVLayout((content,), "a" * 32, shared))
    keys = tuple(n.to_bytes(32, "big") for n in range(shape[0]))
    def lease(number):
        name = f"t{number}", "push", f"r{number}"
        store.transfer_kv([Transfer(*name, tuple(range(shape[0])), keys, hints={"kv_role": "prefill"})])
    leases = asked["leases"]
    for number in range(leases):
        lease(number)
    begun = 0
    real = store._transport and store._transport.begin
    def begin(*pieces):
        global begun
        begun += 1
        motion = real(*pieces)
        if begun == 2 and asked["signal"]:
            os.kill(os.getpid(), asked["signal"])
        return motion
    if store._transport is not None and store._transport.pushes:
        store._transport.begin = begin
    print("at", store.address, flush=True)
    while True:
        for _ in store.transfer_kv([]):  # released: it is leased again
            lease(leases)
            leases += 1
        time.sleep(0.001)
"""

ENGINE = """
    import json, sys, time
    from engine.core import SamplingParams
    from engine.core.registry import make
    from engine.testing import ShadowExecutor, make_core
    store = make("connector", sys.argv[1], json.loads(sys.argv[2]))
    core = make_core(connectors=[store], executor=ShadowExecutor(), num_pages=40, page_size=4)
    core.add([at % 97 for at in range(30)], SamplingParams(max_tokens=1), metadata={"kv_role": "prefill"})
    for _ in range(6):
        core.step()
    print("at", store.address, flush=True)
    while True:
        core.step()
        time.sleep(0.001)
"""


@pytest.fixture(params=WAYS)
def way(request):
    """Name and options of a connector that works here."""
    name, options = WAYS[request.param]
    if request.param == "shared" and sys.platform != "linux":
        pytest.skip("memory is shared on Linux only")
    try:
        make("connector", name, options).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def world(way):
    """Starts processes, and opens a receiver; ends them all."""
    with contextlib.ExitStack() as stack:
        yield World(way, stack)


class World:
    def __init__(self, way: str, stack: contextlib.ExitStack) -> None:
        self.way, self._stack = way, stack
        self.name, self.options = WAYS[way]

    @property
    def pushes(self) -> bool:
        return self.way in ("nixl push", "mooncake")

    def process(self, script: str, *arguments: str):
        command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
        process = self._stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        self._stack.callback(process.kill)
        while not (line := process.stdout.readline()).startswith("at "):
            assert line, "the other process did not start"
        return process, line.removeprefix("at ").strip()

    def sender(self, pages=256, size=PAGE, number=0, port=0, leases=1):
        """A process that leases pages, so many times over, and again when it is released; where it pushes it sends
        itself a signal as the second batch is under way."""
        asked = {
            "name": self.name,
            "options": {**self.options, "port": port},
            "pages": pages,
            "size": size,
            "leases": leases,
        }
        return self.process(CHILD, json.dumps({**asked, "signal": int(number) if self.pushes else 0}))

    def receiver(self, pages=256, size=PAGE, **options):
        shared, mapped = shared_file(pages * size + MARK) or (None, bytearray(pages * size + MARK))
        region = np.frombuffer(mapped, np.uint8, offset=MARK).reshape(pages, size)
        store = make("connector", self.name, {**self.options, **options})
        store.start(where())
        store.register(KVLayout((region,), "a" * 32, shared))
        self._stack.callback(store.close)
        if shared is not None:
            self._stack.callback(os.close, shared.fd)
        return store, region

    def signals(self, store, process, number) -> None:
        """The sender gets a signal before the receiver's second batch. Where it pushes it does that itself."""
        if self.pushes:
            return
        begun = []
        if store._transport is None:
            take = store._road.movers._streamed.move

            def move(load):
                def good(count):
                    if count >= SLOT and not begun:
                        begun.append(1)
                        stop(process, number)
                    load.good(count)

                take(dataclasses.replace(load, good=good))

            store._road.movers._streamed.move = move
            return
        real = store._transport.begin

        def begin(*pieces):
            begun.append(1)
            if len(begun) == 2:
                stop(process, number)
            return real(*pieces)

        store._transport.begin = begin

    def broken_off(self, number, patience):
        """The sender gets a signal in the middle: whole pages have come, and the rest fails."""
        process, address = self.sender(number=number)
        store, region = self.receiver(patience=patience)
        self.signals(store, process, number)
        event = ask(store, "pull", keys(256), range(256), kv_from=address)
        assert event.kind == "failed"
        good = good_pages(event, 256)
        assert SLOT <= good < 256
        assert (region[:good] == content()[:good]).all()
        return process, address, store, region


def stop(process, number) -> None:
    os.kill(process.pid, number)
    if number == signal.SIGSTOP:
        os.waitpid(process.pid, os.WUNTRACED)


def content(pages=256, size=PAGE):
    return np.random.default_rng(5).integers(0, 256, (pages, size), dtype=np.uint8)


def good_pages(event, upto):
    return event.failed_pages[0] if event.failed_pages else upto


def test_what_another_process_computed_is_gone_on_with(world):
    """Whole engines, whose executor compares every read of KV with what its own tokens would have written."""
    process, address = world.process(ENGINE, world.name, json.dumps(world.options))
    store = make("connector", world.name, world.options)
    core = make_core(connectors=[store], executor=ShadowExecutor(), num_pages=40, page_size=4)
    request = core.add(PROMPT, SamplingParams(max_tokens=8), metadata={"kv_from": address})
    settle(core)
    assert (request.cached_tokens, request.num_output, request.finish) == (28, 8, "length")
    assert core.counters.failed_loads == 0
    assert process.poll() is None
    close(core)


def test_thousands_of_scattered_pages_for_four_at_once(world):
    """More pieces than a library takes at once; each load has some of the pages."""
    count, size = 2400, 512
    _, address = world.sender(count, size, leases=4)  # for each a hand-off of its own: none ends with another's release
    store, region = world.receiver(count, size, patience=60.0)
    there, here = random.Random(1), random.Random(2)
    parts = [list(range(at, count, 4)) for at in range(4)]
    for part in parts:
        there.shuffle(part)
    target = here.sample(range(count), count)
    told: dict[str, str] = {}

    def hear(events):  # of any load, whatever the call was for
        told.update({event.transfer_id: f"{event.kind} {event.reason}" for event in events})
        return len(told) == 4

    for number, part in enumerate(parts):
        wanted = [page.to_bytes(32, "big") for page in part]
        where_to = [target[page] for page in part]
        hear(begin(store, "pull", wanted, where_to, name=f"t{number}", request=f"r{number}", kv_from=address))
    wait_for(lambda: hear(store.transfer_kv([])), 60)
    assert set(told.values()) == {"done "}
    assert (region[target] == content(count, size)).all()
    if world.way == "shared":
        assert store.stats()["detours"] == 0, "nothing went over the line"


def test_b24_a_sender_that_is_stopped_and_goes_on_writes_nothing_late(world):
    process, address, store, region = world.broken_off(signal.SIGSTOP, patience=2.0)
    region[:] = 99  # somebody else has these pages now
    os.kill(process.pid, signal.SIGCONT)
    store.transfer_kv([])

    def again():
        assert (region[1:] == 99).all(), "bytes landed after the transfer's end was told"
        return ask(store, "pull", keys(1), [0], kv_from=address).kind == "done"

    wait_for(again)
    wait_for(lambda: again() and not store.stats()["slots_in_limbo"])
    assert (region[1:] == 99).all()
    assert process.poll() is None


def test_a_sender_killed_in_the_middle_leaves_whole_pages_and_is_found_again(world):
    process, address, store, region = world.broken_off(signal.SIGKILL, patience=4.0)
    assert process.wait() == -signal.SIGKILL
    again, same = world.sender(port=int(address.rpartition(":")[2]))
    assert same == address
    wait_for(lambda: ask(store, "pull", keys(256), range(256), kv_from=address).kind == "done")
    assert (region == content()).all()
    assert store.stats()["slots_in_limbo"] == 0, "who was to write to it is gone"
    assert again.poll() is None


@pytest.mark.model
def test_a_real_model_says_the_same_by_every_library():
    """One engine computes, another goes on: by each connector that works here in turn, and not by the line."""
    from engine.core import EngineConfig, assemble

    ways = {}
    for name, options in (("nixl", {"devices": "lo", "host": "127.0.0.1"}), ("mooncake", {})):
        with contextlib.suppress(ConfigError):
            make("connector", name, options).close()
            ways[name] = options
    if not ways:
        pytest.skip("neither nixl nor mooncake is installed: pip install 'sixhooks[nixl,mooncake]'")
    chosen = [{"name": name, "lease_seconds": 60, "patience": 60, **options} for name, options in ways.items()]
    settings = {"num_pages": 64, "page_size": 16, "max_batch_tokens": 64, "connectors": chosen}
    first, second = (assemble(EngineConfig(**settings)) for _ in range(2))
    tokens = [at * 7919 % 40_000 + 10 for at in range(70)]

    def run(core, **fields):
        request = core.add(tokens, SamplingParams(max_tokens=8, temperature=0.0), **fields)
        while not request.finished:
            first.step()
            second.step()
        return request

    expected = run(second, read_cache=False).output
    for name in ways:
        second.kv.reset()
        first.kv.reset()
        run(first, metadata={"kv_role": "prefill", "kv_with": name})
        address = first.describe()["connectors"][name]["address"]
        request = run(second, metadata={"kv_from": f"{name}://{address}"})
        assert (request.output, request.cached_tokens) == (expected, 64)
        assert second.stats()[f"connector_{name}_pages_taken"] == 4
    close(first, second)


class OfALibrary(ConnectorSuite):
    """What every connector must do; skipped where its library is not."""

    remembers = False  # it saves for others

    @pytest.fixture(autouse=True)
    def _here(self):
        try:
            make("connector", self.plugin, dict(self.options)).close()
        except ConfigError as error:
            pytest.skip(str(error))


class TestNixl(OfALibrary):
    plugin = "nixl"
    options = LO


class TestMooncake(OfALibrary):
    plugin = "mooncake"
