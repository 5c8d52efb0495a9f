"""Identity of cached content: typed, length-delimited, cryptographic, the same in every process."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256


def field_bytes(kind: str, value: str) -> bytes:
    """One typed, length-delimited field: no two different field lists give the same bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return kind.encode() + b":" + str(len(data)).encode() + b":" + data + b";"


@lru_cache(maxsize=4096)
def namespace_digest(fingerprint: str, adapter: str, salt: str) -> bytes:
    """Digest of everything, tokens aside, that makes equal tokens unequal KV. 32 bytes."""
    digest = sha256(b"sixhooks-kv-1;")
    digest.update(field_bytes("model", fingerprint))
    digest.update(field_bytes("adapter", adapter))
    digest.update(field_bytes("salt", salt))
    return digest.digest()


def page_digests(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Chained digests of the whole pages that ``tokens`` fill, 32 bytes each.

    A page's digest is the SHA-256 of its parent's digest (the namespace's, for the first page) and its tokens as 32-bit
    little-endian integers. Source: the block hash chain of vLLM.
    """
    data = array(UINT32, tokens)
    if sys.byteorder == "big":
        data.byteswap()
    raw, width = data.tobytes(), 4 * page_size
    digests: list[bytes] = []
    for end in range(width, len(raw) + 1, width):
        parent = sha256(parent + raw[end - width : end]).digest()
        digests.append(parent)
    return digests


UINT32 = next(code for code in "IL" if array(code).itemsize == 4)
