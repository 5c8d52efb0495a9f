"""``multi``: several stores as tiers, one over the other, e.g. memory over files over a server.

It takes over stores that are selected beside it (``--connector multi,host,file``), in their order, the fastest first.
A page is loaded from the uppermost tier that has it, so a prefix may come from several. A tier that fails costs what
only it had.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from engine.core.errors import ConfigError, suggest
from engine.core.memory import Bytes, KVLayout
from engine.core.protocols import Connector, ModelInfo
from engine.plugins.connectors._store import KeptInPart, StoreConnector, StoreOptions
from engine.plugins.connectors._tiers import Copies, Tier, stretch, where

SEEN = 200_000  # keys whose uses are counted


class MultiStore(StoreConnector):
    """Tiers of stores. Source: SGLang's HiCache, whose write and prefetch policies these are.

    Who owns a page's bytes: the tiers; a copy on its way from one to another belongs to a task of this store's.
    """

    name = "multi"
    slice_bytes = 4 * 2**20

    class Options(StoreOptions):
        tiers: tuple[str, ...] = Field(
            (), description="which of the selected stores, the fastest first (default: all, as they are selected)"
        )
        write: Literal["write-through", "selective", "write-back"] = Field(
            "write-through", description="lower tiers get every page, those used often, or what the tier above evicts"
        )
        selective_after: int = Field(2, ge=1, description="uses after which a page is written to the lower tiers")
        prefetch: Literal["best-effort", "wait", "timeout"] = Field(
            "wait", description="load what is in the first tier only, whatever is there, or what comes in time"
        )
        timeout_base: float = Field(0.5, ge=0, description="timeout: seconds that a load may take")
        timeout_per_token: float = Field(0.00025, ge=0, description="timeout: and so many more a token")
        promote: bool = Field(True, description="what is read from a lower tier is copied to those above")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._tiers: list[Tier] = []
        self._lock = threading.Lock()
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._holders: dict[bytes, int] = {}  # a bit a tier; only where somebody listens
        self._fetching: set[bytes] = set()
        self._copies = Copies(self._later)

    def compose(self, others: Sequence[Connector]) -> Sequence[Connector]:
        """Take over the stores among them, or those that ``tiers`` names. Raises ``ConfigError``."""
        seen: Counter[str] = Counter()
        stores: dict[str, StoreConnector] = {}
        for one in others:
            seen[one.name] += 1
            if isinstance(one, StoreConnector) and not isinstance(one, MultiStore):
                stores[one.name if seen[one.name] == 1 else f"{one.name}-{seen[one.name]}"] = one
        names = self.options.tiers or tuple(stores)
        for name in names:
            if name not in stores:
                raise ConfigError(
                    f"connector multi, option tiers: no store {name!r} is selected beside it: {suggest(name, stores)}"
                )
        if not names:
            raise ConfigError("connector multi has no tiers: select stores beside it, e.g. --connector multi,host,file")
        self._tiers = [Tier(stores[name], name) for name in dict.fromkeys(names)]
        return [tier.store for tier in self._tiers]

    def start(self, context: Any) -> None:
        """Start the tiers."""
        super().start(context)
        if not self._tiers:
            raise ConfigError("connector multi has no tiers: the core did not compose it")
        for tier in self._tiers:
            tier.store.start(context)

    def open(self, layout: KVLayout) -> None:
        """Open the tiers. Raises ``ConfigError``."""
        looked_at = self._tiers[:1] if self.options.prefetch == "best-effort" else self._tiers
        self.remote = any(tier.store.remote for tier in looked_at)
        self.threads = 1 + any(tier.store.remote for tier in self._tiers)
        for place, tier in enumerate(self._tiers):
            if self.notice is not None:
                tier.store.notice = partial(self._heard, place)
            if self.options.write == "write-back" and place + 1 < len(self._tiers):
                tier.store.spill = partial(self._spilled, place + 1)
            tier.store.later = self._later
            tier.store.attach(layout)

    def describe(self) -> Mapping[str, Any]:
        """The names of the tiers, the first first."""
        return {"tiers": [tier.name for tier in self._tiers]}

    def stats(self) -> dict[str, int | float]:
        """Own numbers and those of the tiers."""
        own = {**super().stats(), "copied": self._copies.made, "uncopied": self._copies.left_out}
        return {**own, **{name: value for tier in self._tiers for name, value in tier.stats().items()}}

    def weights_changed(self, model: ModelInfo) -> None:
        """Tell the tiers."""
        for tier in self._tiers:
            tier.store.weights_changed(model)

    def close(self) -> None:
        """Close the tiers, after the threads that use them."""
        super().close()
        for tier in self._tiers:
            tier.store.close()

    # ---- looking up and loading

    def look(self, keys: Sequence[bytes]) -> tuple[int, tuple[tuple[int, float], ...]]:
        """What the tiers have, and what loading from each takes. ``best-effort``: what the first tier has, while the
        rest is fetched for whoever asks next."""
        if self.options.prefetch == "best-effort":
            count = self._tiers[0].has_many(keys)
            self._prefetch(keys[count:])
            return count, ((count, self._tiers[0].pace.predict(count)),) if count else ()
        pages, seconds, costs = 0, 0.0, []
        for tier, count in where(self._tiers, keys):
            pages += count
            seconds += tier.pace.predict(count)
            costs.append((pages, seconds))
        return pages, tuple(costs)

    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first some tier has."""
        return sum(count for _, count in where(self._tiers, keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Tell the tiers."""
        for tier in self._tiers:
            tier.store.touch(keys)

    def time_for(self, pages: int) -> float | None:
        """With ``timeout``, so much for all and so much a token."""
        if self.options.prefetch != "timeout":
            return None
        tokens = pages * self._page_size
        return float(self.options.timeout_base + self.options.timeout_per_token * tokens)

    def get_many(self, keys: Sequence[bytes]) -> list[Bytes]:
        """Each page from the uppermost tier that has it."""
        got: list[Bytes] = []
        while len(got) < len(keys):
            rest = keys[len(got) :]
            for place, tier in enumerate(self._tiers):
                pages = tier.get_many(rest[: stretch(self._tiers[:place], rest)])
                if pages:
                    self._spread(place, rest[: len(pages)], pages)
                    got += pages
                    break
            else:
                break
        return got

    # ---- saving

    def keep(self, keys: Sequence[bytes], read: Callable[[int], Bytes]) -> int:
        """Save by the write policy. A tier that refuses is told of when all have been asked.

        Raises ``OSError`` where none has them, ``KeptInPart`` where some do.
        """
        contents: dict[int, Bytes] = {}

        def once(place: int) -> Bytes:
            if place not in contents:
                contents[place] = read(place)
            return contents[place]

        often = self._used(keys)
        kept, wrong, has_it = 0, [], False
        moves_down = self.options.write == "write-back"
        for place, tier in enumerate(self._tiers):
            places = self._due(place, keys, often)
            if not places:
                continue
            count, words = tier.keep([keys[at] for at in places], partial(_at, places, once))
            kept = max(kept, count)
            if words:
                wrong.append(words)
                continue
            has_it = True
            if moves_down:
                return kept
        if wrong:
            raise KeptInPart("; ".join(wrong), kept) if has_it else OSError("; ".join(wrong))
        return kept

    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """As ``keep``, of contents."""
        self.keep(keys, contents.__getitem__)

    def forget_all(self) -> int:
        """Clear the tiers. Pages that several have count once for each. Raises ``OSError`` when all have been asked."""
        with self._lock:
            self._uses.clear()
        gone, wrong = 0, []
        for tier in self._tiers:
            try:
                gone += tier.store.clear()
            except OSError as error:
                wrong.append(f"{tier.name}: {error}")
        if wrong:
            raise OSError("; ".join(wrong))
        return gone

    def clear(self) -> int:
        """Clear the tiers; those that take their time do it in one of the threads."""
        return self.forget_all()

    def _due(self, place: int, keys: Sequence[bytes], often: Sequence[bool]) -> Sequence[int]:
        """Places of the keys that this tier is to get now."""
        if place and self.options.write == "selective":
            return [at for at, yes in enumerate(often) if yes]
        return range(len(keys))

    def _used(self, keys: Sequence[bytes]) -> list[bool]:
        """Count a use of each, if that matters; whether it was used often by now."""
        if self.options.write != "selective":
            return []
        with self._lock:
            for key in keys:
                self._uses[key] = self._uses.pop(key, 0) + 1
            often = [self._uses[key] >= self.options.selective_after for key in keys]
            while len(self._uses) > SEEN:
                self._uses.popitem(last=False)
        return often

    # ---- between tiers

    def _spread(self, place: int, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """What was read from a tier is copied up, and down where it was used often enough by now."""
        for tier in self._tiers[:place] if self.options.promote else ():
            self._copies.begin(tier, keys, pages)
        if self.options.write == "selective":
            chosen = [at for at, yes in enumerate(self._used(keys)) if yes]
            for tier in self._tiers[place + 1 :] if chosen else ():
                self._copies.begin(tier, [keys[at] for at in chosen], [pages[at] for at in chosen])

    def _prefetch(self, keys: Sequence[bytes]) -> None:
        """Fetch into the first tier what those below have, a slice at a time."""
        with self._lock:
            if not keys or keys[0] in self._fetching:
                return
            self._fetching.add(keys[0])
        left = list(keys)

        def task() -> bool:
            part = left[: self._slice]
            got: list[Bytes] = []
            for tier in self._tiers[1:]:
                got += tier.get_many(part[len(got) :])
            count, words = self._tiers[0].keep(part[: len(got)], got.__getitem__) if got else (0, "")
            self._copies.made += count
            del left[: len(part)]
            if left and len(got) == len(part) and not words:
                return True
            with self._lock:
                self._fetching.discard(keys[0])
            return False

        self._later(task)

    def _later(self, task: Callable[[], bool]) -> None:
        self.later(task)

    def _spilled(self, place: int, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """A tier evicts these: the next gets them, or the one after it where that one fails."""
        for tier in self._tiers[place:]:
            if not tier.keep(keys, contents.__getitem__)[1]:
                return

    def _heard(self, place: int, kind: Literal["stored", "removed"], keys: Sequence[bytes]) -> None:
        """A page is there from the first tier that has it to the last that loses it."""
        with self._lock:
            fresh = []
            for key in keys:
                before = self._holders.get(key, 0)
                after = before | 1 << place if kind == "stored" else before & ~(1 << place)
                if after:
                    self._holders[key] = after
                else:
                    self._holders.pop(key, None)
                if bool(before) != bool(after):
                    fresh.append(key)
            self.told(kind, fresh)


def _at(places: Sequence[int], read: Callable[[int], Bytes], place: int) -> Bytes:
    return read(places[place])
