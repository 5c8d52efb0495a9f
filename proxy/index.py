"""Which prompts an engine has seen, roughly: a bounded set of digests of their beginnings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

CHUNK = 128  # bytes of a prompt, as JSON: about two pages of 16 tokens
MOST = 4096  # chunks of a prompt that are looked at
DIGEST = 8


def chain_of(namespace: bytes, text: bytes) -> tuple[bytes, ...]:
    """A digest for each whole chunk of ``text``, each over all before it: equal digests mean equal beginnings.

    Args:
        namespace: what else must be the same for cached KV to fit, e.g. a cache salt.
    """
    last, chain = blake2b(namespace, digest_size=DIGEST).digest(), []
    for start in range(0, min(len(text) // CHUNK, MOST) * CHUNK, CHUNK):
        last = blake2b(last + text[start : start + CHUNK], digest_size=DIGEST).digest()
        chain.append(last)
    return tuple(chain)


class PrefixIndex:
    """What one engine was given. The beginnings that were not met for longest are forgotten first.

    Args:
        most: digests kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def match(self, chain: Sequence[bytes]) -> int:
        """Chunks at the beginning that were met before. Does not mutate."""
        return next((at for at, digest in enumerate(chain) if digest not in self._seen), len(chain))

    def record(self, chain: Sequence[bytes]) -> None:
        """The engine is given this prompt. Mutates.

        Ends are older than beginnings: what is forgotten first leaves the rest of its prompt in place.
        """
        for digest in reversed(chain):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """The engine has lost its cache. Mutates."""
        self._seen.clear()
