"""Identity of cached content: typed, length-delimited, cryptographic, the same in every process."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Container, Sequence
from functools import lru_cache
from hashlib import blake2b


def field_bytes(kind: str, value: str) -> bytes:
    """One typed, length-delimited field: no two different field lists give the same bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return kind.encode() + b":" + str(len(data)).encode() + b":" + data + b";"


@lru_cache(maxsize=4096)
def namespace_digest(fingerprint: str, adapter: str, salt: str) -> bytes:
    """Digest of everything, tokens aside, that makes equal tokens unequal KV. 32 bytes."""
    digest = blake2b(b"sixhooks-kv-1;", digest_size=32)
    digest.update(field_bytes("model", fingerprint))
    digest.update(field_bytes("adapter", adapter))
    digest.update(field_bytes("salt", salt))
    return digest.digest()


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit little-endian integers. Raises ``TypeError`` or ``OverflowError`` for what is none."""
    data = array(UINT32, tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def surely_below(packed: bytes, limit: int) -> bool:
    """True only if every packed token id is below ``limit``; False where a closer look is needed.

    Looks at one byte of each token, the highest that the limit has, at the speed of the interpreter's own loops.
    """
    plane = (limit.bit_length() - 1) // 8
    if plane > 3:
        return True
    higher = range(plane + 1, 4)
    return not packed[plane::4].translate(None, ALL_BYTES[: limit >> 8 * plane]) and not any(
        packed[above::4].strip(b"\0") for above in higher
    )


def page_digests(parent: bytes, packed: bytes, page_size: int) -> list[bytes]:
    """Chained digests of the whole pages that packed tokens fill, 32 bytes each.

    A page's digest is the BLAKE2b-256 of its parent's digest (the namespace's, for the first page) and its packed
    tokens. Source: the block hash chain of vLLM.
    """
    width = 4 * page_size
    digests: list[bytes] = []
    new, found = EMPTY.copy, digests.append  # copying is cheaper than making a new one
    for end in range(width, len(packed) + 1, width):
        digest = new()
        digest.update(parent + packed[end - width : end])
        parent = digest.digest()
        found(parent)
    return digests


def first_known(digests: Sequence[bytes], known: Container[bytes]) -> int:
    """How many digests of a chain are known, from the first on up to one that is not."""
    return next((at for at, digest in enumerate(digests) if digest not in known), len(digests))


ALL_BYTES = bytes(range(256))
EMPTY = blake2b(digest_size=32)
UINT32 = next(code for code in "IL" if array(code).itemsize == 4)
