"""The file tier beside others who use its folder, and in moments when two things happen to one page."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.plugins.connectors._frames import HEADER


def test_a_load_that_meets_damage_has_all_of_its_prefix_mended_by_the_next_save(opened, tmp_path, memory, key, ask):
    """Not page by page, a page a request; also where files are gone that were there."""
    layout = memory()
    keys = [key(at) for at in range(4)]
    store = opened("file", layout)
    ask(store, "push", keys, range(4))
    for at in (0, 1, 3):
        path = next(tmp_path.glob(f"*/*/{keys[at].hex()}"))
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    next(tmp_path.glob(f"*/*/{keys[2].hex()}")).unlink()
    assert ask(store, "pull", keys, range(4, 8)).failed_pages == (4, 5, 6, 7)
    assert ask(store, "push", keys, range(4)).kind == "done"
    assert ask(store, "pull", keys, range(4, 8)).kind == "done"
    assert all((layout.read(at + 4) == layout.read(at)).all() for at in range(4))


def test_a_folder_that_others_change_meanwhile_is_read_all_the_same(opened, tmp_path, memory, key, ask, monkeypatch):
    """Another engine evicts a file, or a person has put one there, while this one looks."""
    ask(opened("file", memory()), "push", [key(0), key(1)], [0, 1])
    path = next(tmp_path.glob(f"*/*/{key(0).hex()}"))
    size = path.stat().st_size
    (path.parent / "notes").write_bytes(bytes(size))
    (path.parent.parent / "README").write_text("ours")
    stat = Path.stat

    def gone(self, **how):
        if self.name == key(0).hex():
            raise FileNotFoundError(self)
        return stat(self, **how)

    monkeypatch.setattr(Path, "stat", gone)
    store = opened("file", memory())
    monkeypatch.undo()
    assert (store.has_many([key(0)]), store.has_many([key(1)])) == (0, 1)

    def evicted(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr("os.utime", evicted)
    assert ask(store, "pull", [key(1)], [5]).kind == "done", "its bytes were read and are right"


@pytest.mark.parametrize("moment", ["cleared", "evicted"])
def test_what_is_said_to_be_kept_is_there_whatever_happens_meanwhile(moment, opened, memory, key, monkeypatch):
    """A page is cleared away just when it was written; a page is written anew just when it is evicted."""
    layout = memory()
    store = opened("file", layout, capacity=str(layout.page_bytes + HEADER.size))
    told = []
    store.notice = lambda kind, keys: told.extend((kind, one) for one in keys)
    if moment == "cleared":
        write = store._write

        def written(name, content):
            write(name, content)
            store.forget_all()

        monkeypatch.setattr(store, "_write", written)
        store.put_many([key(0)], [layout.read(0)])
    else:
        store.put_many([key(0)], [layout.read(0)])
        monkeypatch.setattr(store, "_most", 2)
        with store._lock:
            del store._files[key(0)]  # chosen to go
        store.put_many([key(0)], [layout.read(0)])
        store._evict(key(0))
    there = store._path(key(0)).exists()
    assert there == (moment == "evicted")
    assert store.has_many([key(0)]) == there
    assert [kind for kind, _ in told][-1:] in ([["stored"]] if there else [[], ["removed"]])


def test_a_folder_that_is_gone_is_cleared_like_any_other(opened, tmp_path, memory, key, ask):
    store = opened("file", memory())
    ask(store, "push", [key(0)], [0])
    shutil.rmtree(next(tmp_path.iterdir()))
    assert store.clear() == 1
    assert ask(store, "push", [key(0)], [0]).kind == "done"
    assert ask(store, "pull", [key(0)], [5]).kind == "done"
