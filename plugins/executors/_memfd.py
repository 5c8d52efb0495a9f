"""Memory that another process of the same host can map: a file without a name, marked, that cannot become shorter."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import sys

from engine.core.memory import SharedMemory

MARK = 32  # bytes


def shared_file(size: int) -> tuple[SharedMemory, mmap.mmap] | None:
    """A file of so many bytes, zeroed but for the mark, and its mapping; ``None`` where the system has no memfd.

    The file is the caller's to close; the mapping stays good without it.
    """
    if sys.platform != "linux":
        return None
    try:
        fd = os.memfd_create("sixhooks-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        return None
    mark = memory[:MARK] = secrets.token_bytes(MARK)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return SharedMemory(fd, size, start, mark), memory
