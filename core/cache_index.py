"""The other end of cache events: an index of what an engine has cached, kept up to date and never silently wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.core.cache_events import POOL, CacheBatch, CacheEvent, CacheSnapshot
from engine.core.identity import first_known

Need = Literal["nothing", "replay", "snapshot"]


class CacheIndex:
    """Which pages can be found in an engine's tiers, by the events that it tells. Starts empty: ``load`` a snapshot.

    Example::

        index = CacheIndex()
        index.load(log.snapshot())
        for batch in stream:
            need = index.apply(batch)
            if need == "replay":  # events were lost: ask for those from index.sequence on
                ...
            elif need == "snapshot":  # the engine or its cache started anew
                ...

    Attributes:
        epoch: that of the entries; ``None`` before the first snapshot.
        sequence: the number of the next event.
        page_size: tokens a page.
        tiers: by name of the tier, the parent (or ``None``) of each page's key.
    """

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.sequence = 0
        self.page_size = 0
        self.tiers: dict[str, dict[bytes, bytes | None]] = {}
        self._over: list[str] = []  # epochs that have ended: what still comes of them is late

    def load(self, snapshot: CacheSnapshot) -> None:
        """Begin anew with these entries. Mutates."""
        if self.epoch not in (None, snapshot.epoch):
            self._over = [*self._over[-7:], str(self.epoch)]
        self.epoch, self.sequence, self.page_size = snapshot.epoch, snapshot.sequence, snapshot.page_size
        self.tiers = {}
        for event in snapshot.entries:
            self._enter(event)

    def apply(self, batch: CacheBatch, upto: int | None = None) -> Need:
        """Take in events; those known already are passed over. Mutates only if the answer is ``nothing``.

        Args:
            upto: take none of this number or a later one.

        Returns ``replay`` where events before it are missing, ``snapshot`` where it is of another epoch.
        """
        if batch.epoch != self.epoch:
            return "nothing" if batch.epoch in self._over else "snapshot"
        if batch.sequence > self.sequence:
            return "nothing" if upto is not None and self.sequence >= upto else "replay"
        end = batch.end if upto is None else min(batch.end, upto)
        for event in batch.events[self.sequence - batch.sequence : max(0, end - batch.sequence)]:
            self._enter(event)
            self.sequence += 1
        return "nothing"

    def pages(self, tier: str = POOL) -> set[bytes]:
        """The keys of all pages of a tier."""
        return set(self.tiers.get(tier, ()))

    def match(self, keys: Sequence[bytes], tier: str = POOL) -> int:
        """How many pages of a chain (``core.identity.page_digests``) the tier has, from the first on."""
        return first_known(keys, self.tiers.get(tier, {}))

    def _enter(self, event: CacheEvent) -> None:
        entries = self.tiers.setdefault(event.tier, {})
        match event.kind:
            case "stored":
                entries[event.key] = event.parent
            case "removed":
                entries.pop(event.key, None)
            case "cleared":
                entries.clear()
