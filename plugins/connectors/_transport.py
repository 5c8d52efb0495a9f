"""What a library must give so that pages can travel by it: it moves bytes between two engines' registered memory.

The control plane (who gives what to whom, until when) is the connector's. Two styles: in *pull* the
receiver reads the sender's memory; in *push* the sender writes into the receiver's. A transport may go on writing after
it was told to stop (``late_writes``): such a one is only ever pointed at a staging area, never at KV memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""Addresses, or numbers of bytes."""


class TransportError(Exception):
    """A peer cannot be reached, or the library failed; the words say how."""


class Motion(ABC):
    """Bytes under way. One thread at a time uses it, not always the same.

    Attribute ``reason``: why it failed.
    """

    reason: str = ""

    @abstractmethod
    def state(self) -> Literal["moving", "done", "failed"]:
        """Look, without waiting. ``done``: all bytes have arrived. ``failed``: some may have."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody looks any more; give the library's handle back. Idempotent. Where the transport has ``late_writes``,
        bytes may still arrive."""


class Transport(ABC):
    """Moves bytes between this process's memory and a peer's. Any thread may call; calls may take as long as a copy.

    Class attributes:
        name: which library, in messages.
        pushes: it writes into the peer's memory; otherwise it reads it.
        late_writes: bytes of a motion that was dropped, or that failed, may still arrive.
        failed_is_final: of a motion that failed nothing arrives any more, also where ``late_writes``.
        most: pieces that one motion may have.
    """

    name: ClassVar[str]
    pushes: ClassVar[bool] = False
    late_writes: ClassVar[bool] = True
    failed_is_final: ClassVar[bool] = False
    most: ClassVar[int] = 1024

    @abstractmethod
    def open(self, memory: Sequence[NDArray[np.uint8]]) -> str:
        """Register contiguous memory, which stays where it is until ``close``. Called once, first.

        Returns the card: what a peer needs to connect, as text. Raises ``TransportError``.
        """

    @abstractmethod
    def connect(self, peer: str, card: str) -> None:
        """Make ready for motions with a peer (its incarnation). Idempotent. Raises ``TransportError``."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer. Its motions that are still open fail, or go on to say the truth. Idempotent, fine for unknown
        peers."""

    @abstractmethod
    def begin(self, peer: str, ours: Words, theirs: Words, lengths: Words) -> Motion:
        """Move pieces: ``lengths[i]`` bytes between ``ours[i]`` here and ``theirs[i]`` there; at most ``most``.

        Raises ``TransportError``, having begun nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Motions must have ended or been dropped. Idempotent."""
