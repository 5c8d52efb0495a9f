"""A page as it lies in a file or on a server: a header that says what it is, then its bytes.

Whatever happened to it, its content is used only if it is what was saved: the header names the layout and the key and
carries a checksum of the bytes.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np

from engine.core.memory import Bytes

MAGIC = b"sixhooks-page-1\n"
HEADER = struct.Struct("<16s32s32sQ16s")  # magic, layout digest, key, bytes, checksum


class DamagedPage(Exception):
    """What was kept is not what its name says: cut short, altered, or of another layout."""


def header_of(layout: str, key: bytes, content: Bytes) -> bytes:
    """The header of a page. ``layout`` is ``KVLayout.digest``."""
    return HEADER.pack(MAGIC, layout.encode(), key, content.nbytes, _checksum(content.data))


def unframed(layout: str, key: bytes, size: int, data: bytes) -> Bytes:
    """The ``size`` bytes of a page out of its frame, not copied. Raises ``DamagedPage``."""
    if len(data) != HEADER.size + size:
        raise DamagedPage(f"{len(data)} bytes where there should be {HEADER.size + size}")
    magic, digest, name, length, checksum = HEADER.unpack_from(data)
    if (magic, digest, name, length) != (MAGIC, layout.encode(), key, size):
        raise DamagedPage("the header names another page, layout or version")
    content = memoryview(data)[HEADER.size :]
    if _checksum(content) != checksum:
        raise DamagedPage("the checksum does not fit the bytes")
    return np.frombuffer(content, np.uint8)


def _checksum(content: memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
