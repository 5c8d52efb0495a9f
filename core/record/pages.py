"""Tokens without their text: digests of groups of tokens, chained under a secret, and tokens that stand for them.

Prefix caches decide by whether prefixes are equal, page by page. Two sequences share as many digests as they share
whole groups at their beginning. Whoever has the secret could try texts; it is never written. The same group behind
another beginning has another digest, so nothing can be counted.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import blake2b

from engine.core.identity import page_digests

WIDTH = 5  # bytes kept of a digest: only those that follow the same beginning must differ
HEAD = 32  # tokens: the radix scheduler's orders compare beginnings of so many
FIRST_UNIQUE = 2**30  # from here on numbers stand for tokens of which nothing is known


def group_of(page_size: int) -> int:
    """Tokens that one digest stands for."""
    return math.gcd(page_size, HEAD)


class Veil:
    """Hides tokens and words: equal ones are hidden in the same way by the same secret.

    Args:
        secret: 32 random bytes.
        group: tokens a digest.

    Attribute ``root``: what a sequence's first digest is chained to.
    """

    def __init__(self, secret: bytes, group: int) -> None:
        self.root = blake2b(b"record", key=secret, digest_size=32).digest()
        self._secret = secret
        self.group = group

    def pages(self, packed: bytes, parent: bytes) -> tuple[str, bytes]:
        """Digests of the whole groups of packed tokens, as text, and what the next one is chained to."""
        digests = page_digests(parent, packed, self.group)
        return b64encode(b"".join([digest[:WIDTH] for digest in digests])).decode(), digests[-1] if digests else parent

    def word(self, text: str) -> str:
        """A digest of a word; the empty word stays empty."""
        data = text.encode("utf-8", "surrogatepass")
        return "~" + blake2b(data, key=self._secret, digest_size=8).hexdigest() if text else ""


def digests_of(pages: str) -> Sequence[bytes]:
    """The digests that ``Veil.pages`` gave. Raises ``ValueError`` for what it never gives."""
    data = b64decode(pages, validate=True)
    if len(data) % WIDTH:
        raise ValueError(f"{len(data)} bytes of digests are no multiple of {WIDTH}")
    return [data[at : at + WIDTH] for at in range(0, len(data), WIDTH)]


class Unveiling:
    """Tokens for digests: equal prefixes of digests become equal prefixes of tokens, and different ones differ.

    A token is a number below 2**31.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._unique = FIRST_UNIQUE

    def tokens(self, digests: Sequence[bytes], count: int) -> list[int]:
        """``count`` tokens that begin with these groups; what follows them is like nothing else. Mutates."""
        found: list[int] = []
        parent, rest = 0, [0] * (self.group - 1)
        for digest in digests:
            parent = self._numbers.setdefault((parent, digest), len(self._numbers) + 1)
            found.append(parent)
            found += rest
        return [*found, *self.unique(count - len(found))][:count]

    def unique(self, count: int) -> range:
        """So many tokens that were never given before. Mutates."""
        first = self._unique
        self._unique += max(0, count)
        return range(first, self._unique)
