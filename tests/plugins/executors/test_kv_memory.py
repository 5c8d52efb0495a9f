"""Where KV memory lies: in a file that processes of the same host can map, or in ordinary memory."""

from __future__ import annotations

import mmap
import os

import pytest

from engine.core.errors import ConfigError


def test_kv_lies_in_memory_that_other_processes_can_map(make_executor, tiny):
    """The file that the layout names holds every region; it outlives the executor as long as somebody looks at it."""
    executor = make_executor(tiny())
    layout = executor.kv_layout()
    if layout.shared is None:
        pytest.skip("this system has no memfd")
    shared = layout.shared
    with mmap.mmap(shared.fd, shared.size, prot=mmap.PROT_READ) as view:
        assert view[: len(shared.mark)] == shared.mark
        for number, region in enumerate(layout.regions):
            region[1] = number + 1
            offset = region.ctypes.data - shared.start
            assert 0 < offset <= shared.size - region.nbytes
            assert view[offset + region.shape[1]] == number + 1
            assert not any(view[offset : offset + region.shape[1]]), "zeroed"
        for _, tensor in sorted(executor.kv.items()):
            assert tensor[0].is_contiguous()
            assert tensor[0].data_ptr() % 64 == 0
    executor.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(shared.fd)
    assert layout.regions[0][1, 0] == 1, "stays mapped"


def test_without_a_memfd_kv_lies_in_ordinary_memory(make_executor, tiny, monkeypatch):
    def none(name, flags):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none, raising=False)
    executor = make_executor(tiny())
    layout = executor.kv_layout()
    assert layout.shared is None
    assert len(layout.regions) == 2 * len(executor.kv)
    assert not any(region.any() for region in layout.regions)


def test_more_kv_than_there_is_memory_is_refused_and_nothing_is_lost(make_executor, tiny):
    executor = make_executor(tiny())
    layout, page = executor.kv_layout(), executor.kv_layout().page_bytes
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(ConfigError, match=r"KV pages of \d+ bytes are .* GiB, and this machine has .* GiB of memory"):
        executor.allocate(there // page + 1, executor._runner._page_size)
    layout.regions[0][1] = 7
    assert executor.kv_layout().regions[0][1, 0] == 7
    executor.close()
