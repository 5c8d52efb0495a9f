"""Identity of cached content: typed, length-delimited, cryptographic, the same in every process."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache


def field_bytes(kind: str, value: str) -> bytes:
    """One typed, length-delimited field: no two different field lists give the same bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return kind.encode() + b":" + str(len(data)).encode() + b":" + data + b";"


@lru_cache(maxsize=4096)
def namespace_digest(fingerprint: str, adapter: str, salt: str) -> bytes:
    """Digest of everything, tokens aside, that makes equal tokens unequal KV. 32 bytes."""
    digest = hashlib.sha256(b"sixhooks-kv-1;")
    digest.update(field_bytes("model", fingerprint))
    digest.update(field_bytes("adapter", adapter))
    digest.update(field_bytes("salt", salt))
    return digest.digest()


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Chained digest of one page: its tokens (64-bit little-endian integers) under its parent's digest. 32 bytes.

    Source: the block hash chain of vLLM.
    """
    data = array("q", tokens)
    if BIG_ENDIAN:
        data.byteswap()
    return hashlib.sha256(parent + data.tobytes()).digest()


BIG_ENDIAN = array("H", [1]).tobytes() == b"\0\1"
