"""KV memory as connectors see it: where the bytes of a page lie, and a digest of all that shapes them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.identity import field_bytes

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The file without a name (a sealed memfd) in which all regions lie, so that processes of this user can map them.

    Whoever may look into this process (the same user, with no stricter rule of the system's) could read its memory
    anyway; this only makes it fast.

    Args:
        fd: the file, as long as whoever allocated it has not closed it.
        size: its bytes. They can not become fewer: a mapping stays good.
        start: address at which this process has mapped it, from its first byte on.
        mark: random bytes with which it begins, so that a peer can tell that it has mapped the right one.
    """

    fd: int
    size: int
    start: int
    mark: bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A page's bytes are row ``page`` of every region, one region after the other.

    Args:
        regions: views of the executor's memory itself, ``[num_pages, bytes a page]`` each, of contiguous rows. None at
            all where a model keeps no KV (``sim``): then only keys are moved.
        digest: of everything that shapes the bytes and is not in the content's keys: dtype, layers, page size, order.
        shared: where the regions lie in memory that other processes can map; ``None``: they do not.
    """

    regions: tuple[Bytes, ...]
    digest: str
    shared: SharedMemory | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(region.shape[1] for region in self.regions)

    def read(self, page: int) -> Bytes:
        """A copy of a page's bytes, ``[page_bytes]``. Does not mutate."""
        if not self.regions:
            return np.empty(0, np.uint8)
        return np.concatenate([region[page] for region in self.regions])

    def write(self, page: int, content: Bytes) -> None:
        """Fill a page. Mutates KV memory. Raises ``ValueError`` where the size is another."""
        if content.shape != (self.page_bytes,):
            raise ValueError(f"{content.nbytes} bytes for a page of {self.page_bytes}")
        at = 0
        for region in self.regions:
            end = at + region.shape[1]
            region[page] = content[at:end]
            at = end


def layout_digest(**shape: Any) -> str:
    """A digest of named facts about the memory, in the order in which they are given. 32 hex digits."""
    digest = blake2b(b"sixhooks-layout-1;", digest_size=16)
    for name, value in shape.items():
        digest.update(field_bytes(name, str(value)))
    return digest.hexdigest()
