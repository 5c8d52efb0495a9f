"""The host and the file tier: bytes come back as they were, or not at all."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from engine.core import ConfigError
from engine.core.plan import Transfer
from engine.plugins.connectors._frames import HEADER
from engine.plugins.connectors.file import FileStore
from engine.plugins.connectors.host import HostStore
from engine.testing import make_core

PAGES = 12
LONGEST = 20.0  # seconds after which a test gives up


both = pytest.mark.parametrize("name", ["host", "file"])


@both
def test_bytes_come_back_as_they_were(name, opened, memory, key, ask):
    layout = memory()
    before = [layout.read(page) for page in range(PAGES)]
    store = opened(name, layout)
    assert ask(store, "push", map(key, range(5)), range(5)).kind == "done"
    for region in layout.regions:
        region[:] = 0
    assert ask(store, "probe", map(key, range(8))).tokens == 5 * 4
    assert ask(store, "pull", map(key, range(5)), range(6, 11)).kind == "done"
    for number in range(5):
        assert (layout.read(6 + number) == before[number]).all()
    assert not layout.read(0).any(), "nothing else was written"
    assert not layout.read(11).any()


@both
def test_what_is_not_there_fails_from_there_on(name, opened, memory, key, ask):
    layout = memory()
    store = opened(name, layout)
    ask(store, "push", [key(0), key(1), key(3)], [0, 1, 3])
    event = ask(store, "pull", map(key, range(4)), [6, 7, 8, 9])
    assert (event.kind, event.failed_pages) == ("failed", (8, 9))
    assert "not there" in event.reason
    assert ask(store, "pull", [key(0)], [1, 2]).reason == "1 keys for 2 pages"


@both
def test_what_was_used_last_goes_last_and_prefixes_lose_their_ends_first(name, opened, memory, key, ask):
    layout = memory()
    size = layout.page_bytes + (HEADER.size if name == "file" else 0)
    store = opened(name, layout, capacity=str(4 * size))
    for number in range(4):
        ask(store, "push", [key(number)], [number])
    ask(store, "probe", [key(0), key(1)])
    ask(store, "push", [key(9)], [9])
    assert [store.has_many([key(number)]) for number in (0, 1, 2, 3, 9)] == [1, 1, 0, 1, 1]
    ask(store, "push", [key(10)], [10])
    ask(store, "push", [key(11)], [11])
    assert [store.has_many([key(number)]) for number in (0, 1)] == [1, 0]
    with pytest.raises(ConfigError, match=f"connector {name}: capacity 3 does not hold one page of {size} bytes"):
        opened(name, layout, capacity="3")


@both
def test_a_closed_store_leaves_no_thread_and_a_cancel_of_what_has_ended_nothing(name, opened, memory, key, ask):
    store = opened(name, memory())
    ask(store, "push", [key(0)], [0])
    store.transfer_kv([Transfer("cancel x", "cancel", "r", of="x")])
    assert ask(store, "pull", [key(0)], [1], name="x").kind == "done", "a cancel is for what is open"
    store.close()
    assert f"engine-{name}" not in {thread.name for thread in threading.enumerate()}


@both
def test_what_is_kept_is_told_and_what_is_cleared_too(name, opened, memory, key, ask, tmp_path, eventually):
    layout = memory()
    size = layout.page_bytes + (HEADER.size if name == "file" else 0)
    heard = []
    store = opened(name, layout, capacity=str(3 * size))
    store.notice = lambda kind, keys: heard.extend((kind, int.from_bytes(one, "big")) for one in keys)
    for number in range(4):
        ask(store, "push", [key(number)], [number])
    assert heard == [("stored", 0), ("stored", 1), ("stored", 2), ("stored", 3), ("removed", 0)]
    assert store.stats() == {"hits": 0, "kept": 4, "errors": 0}
    heard.clear()
    assert store.clear() == 3
    assert sorted(heard) == [("removed", 1), ("removed", 2), ("removed", 3)]
    assert ask(store, "probe", [key(2)]).tokens == 0
    assert ask(store, "push", [key(2)], [2]).kind == "done"
    eventually(lambda: not list(tmp_path.glob("*.cleared*")))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == (name == "file")


class Stuck(HostStore):
    """Hangs where the test says, until it says otherwise."""

    name = "stuck"
    remote = True

    def __init__(self, options=None):
        super().__init__(options)
        self.hang = set()
        self.go = threading.Event()

    def _perhaps(self, what):
        if what in self.hang:
            self.go.wait(LONGEST)

    def has_many(self, keys):
        self._perhaps("probe")
        return super().has_many(keys)

    def get_many(self, keys):
        self._perhaps("pull")
        return super().get_many(keys)

    def put_many(self, keys, contents):
        self._perhaps("push")
        super().put_many(keys, contents)


def test_whatever_a_store_hangs_in_its_transfers_end_and_touch_no_page_after_that(opened, memory, key, ask, eventually):
    layout = memory()
    store = opened(Stuck(Stuck.Options(patience=0.2)), layout)
    ask(store, "push", [key(0), key(1)], [0, 1])
    before = layout.read(5).copy()
    store.hang = {"pull", "probe", "push"}
    store.transfer_kv([Transfer("load", "pull", "r", (5,), (key(0),))])
    eventually(lambda: not store._workers._queues["pull"])  # a worker is at it
    (event,) = store.transfer_kv([Transfer("c", "cancel", "r", of="load")])
    assert (event.transfer_id, event.kind, event.reason, event.failed_pages) == ("load", "failed", "cancelled", (5,))
    assert ask(store, "probe", [key(0)]).tokens == 0, "nobody is there to look"
    event = ask(store, "push", [key(3)], [3])
    assert (event.kind, event.reason) == ("failed", "the store hangs")
    store.go.set()
    eventually(lambda: store._workers._hanging == 0)
    assert (layout.read(5) == before).all()
    assert ask(store, "probe", [key(0), key(1)]).tokens == 8, "it goes on where it hung"
    assert list(store.transfer_kv([])) == []


@pytest.mark.parametrize(("kind", "reason"), [("probe", ""), ("pull", "no answer for"), ("push", "no answer for")])
def test_a_call_that_takes_too_long_is_not_waited_for(kind, reason, opened, memory, key, ask):
    store = opened(Stuck(Stuck.Options(patience=0.1)), memory())
    ask(store, "push", [key(0)], [0])
    store.hang = {kind}
    event = ask(store, kind, [key(0 if kind != "push" else 1)], [1] if kind != "probe" else ())
    assert event.kind == ("found" if kind == "probe" else "failed")
    assert reason in event.reason
    store.go.set()


def test_a_store_that_fails_is_left_alone_for_a_while(opened, memory, key, ask, caplog):
    store = opened(Stuck(), memory())
    ask(store, "push", [key(0)], [0])
    calls = []

    def broken(keys):
        calls.append(keys)
        raise ConnectionError("the line is down")

    store.has_many = broken
    for _ in range(5):
        assert (ask(store, "probe", [key(0)]).kind, ask(store, "probe", [key(0)]).tokens) == ("found", 0)
    assert len(calls) == 1
    assert "the line is down" in ask(store, "pull", [key(0)], [1]).reason
    assert [line.message for line in caplog.records] == [
        "connector stuck is left alone for a while: Unreachable: ConnectionError: the line is down"
    ]
    assert store.stats()["outages"] == 1


def damage(path, how):
    data = path.read_bytes()
    if how == "flipped":
        data = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    elif how == "cut":
        data = data[:-1]
    elif how == "empty":
        data = b""
    elif how == "other key":
        data = data[:48] + bytes(32) + data[80:]
    elif how == "other version":
        data = b"sixhooks-page-0\n" + data[16:]
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "other key", "other version"])
def test_a_damaged_file_is_never_used_and_is_gone_after(how, opened, tmp_path, memory, key, ask):
    layout = memory()
    store = opened("file", layout)
    ask(store, "push", [key(0), key(1)], [0, 1])
    path = next(tmp_path.glob(f"*/*/{key(1).hex()}"))
    damage(path, how)
    event = ask(store, "pull", [key(0), key(1)], [6, 7])
    assert event.failed_pages == (7,)
    assert "DamagedPage" in event.reason
    assert not path.exists()
    assert ask(store, "push", [key(1)], [1]).kind == "done"
    assert ask(store, "pull", [key(1)], [7]).kind == "done"
    assert (layout.read(7) == layout.read(1)).all()


def test_b28_engines_of_another_kind_share_a_folder_and_never_a_page(opened, memory, key, ask):
    layouts = [memory(), memory(sizes=(64,), digest="b" * 32), memory(digest="c" * 32)]
    stores = [opened("file", layout) for layout in layouts]
    for (number, store), other in itertools.product(enumerate(stores), stores):
        ask(store, "push", [key(number)], [number])
        if other is not store:
            assert ask(other, "probe", [key(number)]).tokens == 0


def test_a_folder_that_cannot_be_used_is_refused(opened, tmp_path, memory):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="connector file: root .*taken"):
        opened("file", memory(), root=str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="option root is needed"):
        opened("file", memory(), root="")
    with pytest.raises(ConfigError, match="capacity.*not a size"):
        opened("host", memory(), capacity="many")


def test_a_full_disk_is_a_failed_save_and_nothing_is_left(opened, tmp_path, monkeypatch, memory, key, ask):
    """Stands for the disk: the moment at which the written file is to take its place."""
    layout = memory()
    store = opened("file", layout)

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    event = ask(store, "push", [key(0)], [0])
    assert (event.kind, "No space left" in event.reason) == ("failed", True)
    assert ask(store, "probe", [key(0)]).tokens == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.undo()
    assert ask(store, "push", [key(0)], [0]).kind == "done"


WRITER = """
    import sys, time
    from engine.core import EngineConfig, SamplingParams, assemble
    core = assemble(EngineConfig(executor="sim", connectors=[{"name": "file", "root": sys.argv[1]}], page_size=4))
    for number in range(10**6):
        core.add([number % 50] * 9 + list(range(20)), SamplingParams(max_tokens=4))
        while core.has_work:
            core.step()
        print(number, flush=True)
"""


def test_kill_9_and_restart_finds_the_prefixes_warm(tmp_path):
    """Killed in the middle of its writing, three times over one folder; each file is whole or not there."""
    from engine.core import EngineConfig, SamplingParams, assemble

    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(25):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
    core = assemble(EngineConfig(executor="sim", connectors=[{"name": "file", "root": str(tmp_path)}], page_size=4))
    request = core.add([3] * 9 + list(range(20)), SamplingParams(max_tokens=4))
    while core.has_work:
        core.step()
    assert request.cached_tokens == 28
    assert core.counters.failed_loads == 0
    core.close()


def test_old_unfinished_files_are_cleared_away_and_young_ones_left(opened, tmp_path, memory):
    layout = memory()
    opened("file", layout)
    folder = tmp_path / layout.digest / "00"
    folder.mkdir()
    old, young = folder / "00ab.17", folder / "00cd.18"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    opened("file", layout)
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize("kind", [HostStore, FileStore])
def test_two_stores_of_one_name_have_transfers_of_their_own(kind, tmp_path):
    from engine.core import SamplingParams
    from engine.testing import ShadowExecutor

    options = [{"root": str(tmp_path / str(number))} if kind is FileStore else {} for number in range(2)]
    stores = [kind(kind.Options(**each)) for each in options]
    core = make_core(connectors=stores, executor=ShadowExecutor())
    core.add(list(range(20)), SamplingParams(max_tokens=2))
    while core.has_work:
        core.step()
    assert [store.kept for store in stores] == [5, 5]
    assert core.counters.stray_events == 0
    core.close()
