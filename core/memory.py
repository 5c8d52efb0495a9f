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
class KVLayout:
    """A page's bytes are row ``page`` of every region, one region after the other.

    Args:
        regions: views of the executor's memory itself, ``[num_pages, bytes a page]`` each, of contiguous rows. None at
            all where a model keeps no KV (``sim``): then only keys are moved.
        digest: of everything that shapes the bytes and is not in the content's keys: dtype, layers, page size, order.
    """

    regions: tuple[Bytes, ...]
    digest: str

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
