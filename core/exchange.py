"""KV from outside and to outside: the control plane of transfers, one for all connectors, schedulers and caches.

What comes in only ever fills the prefix cache. A request whose prefix is found elsewhere stays parked while a
*stand-in* takes pages for it; when the bytes are there the stand-in publishes them and lets go, the request joins the
queue, and its scheduler sees a prefix hit like any other:

    asked ── found(n) ──▶ chosen ── pages ──▶ loading ── done ──▶ published, ready
      │ nothing, late        │ late              │ failed ──▶ published up to the first bad page, ready
      ▼                      ▼                   │ late, aborted ──▶ cancelled: ready at once, or gone; the pages stay
    ready                  ready                 ▼                   fenced until the connector has ended the transfer
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.errors import ConfigError
from engine.core.identity import page_digests
from engine.core.outgoing import Outgoing
from engine.core.pace import Pace
from engine.core.plan import Plan, Transfer, TransferEvent
from engine.core.protocols import Connector, Executor
from engine.core.request import Request, State
from engine.core.transfers import TransferBook, hints_of

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

log = logging.getLogger(__name__)

KV = "kv"  # what a parked request waits for
REST = 0.0005  # seconds between two looks at the connectors while nothing can be computed
LONG_REST = 0.02  # the same, while nobody waits for them: all that is open goes out
PATIENCE = 5.0  # seconds
RETRY = 16  # one in so many loads is tried although loading has been slower than computing


@dataclass(slots=True, eq=False)
class Load:
    """A prefix that may come from outside."""

    request: Request
    keys: list[bytes]  # of the whole pages before the last token
    deadline: float
    probes: dict[str, Connector] = field(default_factory=dict)  # open ones by transfer id
    source: Connector | None = None  # who has the most of it
    found: str = ""  # the probe by which it found it
    upto: int = 0  # tokens that it has
    costs: tuple[tuple[int, float], ...] = ()  # what it says that loading them takes
    stand_in: Request | None = None
    first: int = 0  # pages that were cached here when the transfer began
    pull: str = ""
    begun: float = 0.0
    awaited: bool = True  # somebody still waits for it


class Exchange:
    """Looks prefixes up, loads them, and hands on what was computed.

    Attribute ``evicted``: pages evicted for what comes in, since the core asked last.
    """

    def __init__(self, core: EngineCore, connectors: Sequence[Connector]) -> None:
        self._core = core
        self._sources = [connector for connector in connectors if connector.loads]
        self._sinks = [connector for connector in connectors if connector.saves]
        self._book = TransferBook(core.pool)
        self._outgoing = Outgoing(core, self._sinks, self._book, self._name)
        self._loads: dict[Request, Load] = {}  # of requests that are parked for it
        self._probing: dict[str, Load] = {}
        self._loading: dict[str, Load] = {}
        self._names = self._chances = 0
        self._pace = Pace()
        self.evicted = 0

    @property
    def connectors(self) -> list[Connector]:
        """Those that load or save, each once."""
        return list(dict.fromkeys([*self._sources, *self._sinks]))

    def __len__(self) -> int:
        return len(self._book) + len(self._loads) + self._book.unsaid

    @property
    def incoming(self) -> bool:
        """Whether anything is open but what goes out."""
        return len(self) > len(self._outgoing)

    def register(self, executor: Executor) -> None:
        """Show the connectors where KV memory lies. Raises ``ConfigError`` where the executor has none to show."""
        connectors = self.connectors
        layout = executor.kv_layout() if connectors else None
        for connector in connectors:
            if layout is None:
                raise ConfigError(
                    f"connector {connector.name!r} moves KV, and nobody but executor {executor.name!r} itself can "
                    "reach its memory"
                )
            connector.register(layout)
        if connectors:
            self._core.describe_also(
                connectors={self._core.hooks.name(one): dict(one.describe()) for one in connectors}
            )

    def stats(self) -> dict[str, int | float]:
        """The connectors' own numbers, and what was measured of them."""
        own = {
            f"connector_{self._core.hooks.name(one)}_{name}": value
            for one in self.connectors
            for name, value in (*one.stats().items(), *self._pace.stats_of(one).items())
        }
        return {**own, **(self._pace.stats() if self._sources else {})}

    def drain(self) -> bool:
        """Wait for what is open, for as long as a request would be kept waiting. True if nothing is open then.

        What goes out may stay open: its pages are fenced and its keys name the weights that computed it.
        """
        until = time.monotonic() + max((source.patience for source in self._sources), default=PATIENCE)
        while self.incoming and time.monotonic() < until:
            self.move()
            time.sleep(REST)
        return not self.incoming

    def reset(self) -> None:
        """The keys of all content have changed. Mutates."""
        self._outgoing.reset()

    def stand_ins(self) -> Iterator[Request]:
        """Those that hold pages for what is coming in."""
        return (load.stand_in for load in self._loading.values() if load.stand_in is not None)

    def ask(self, wish: Transfer) -> None:
        """Open a transfer of somebody else's; its request, if parked, becomes ready when it has ended. Mutates."""
        last = self._core.flight.last
        self._book.ask(wish, last.index if last is not None and wish.kind == "pull" else 0)

    # ---- what comes in

    def wants(self, num_tokens: int, *, read_cache: bool) -> bool:
        """Whether a new request of so many tokens is to be parked for ``look_up``."""
        return bool(self._sources) and read_cache and self._core.kv.caching and num_tokens > self._core.limits.page_size

    def look_up(self, request: Request) -> None:
        """Ask every source for the longest prefix that it has. Mutates. The request is parked for ``KV``."""
        core, size = self._core, self._core.limits.page_size
        pages = (request.num_tokens - 1) // size
        keys = page_digests(request.namespace, request.packed_tokens(0, pages * size), size)
        patience = max(source.patience for source in self._sources)
        hints = hints_of(request)
        load = self._loads[request] = Load(request, keys, core.roster.now() + patience)
        for source in self._sources:
            name = self._name(request)
            load.probes[name] = source
            self._probing[name] = load
            to = core.hooks.name(source)
            self._book.ask(Transfer(name, "probe", request.id, keys=tuple(keys), to=to, hints=hints))

    def forget(self, request: Request) -> None:
        """The request ended: nobody waits for what comes in for it. Mutates."""
        self._outgoing.forget(request)
        load = self._loads.pop(request, None)
        if load is not None:
            self._give_up(load)

    def move(self) -> None:
        """Once a step, before it is planned: tell the connectors, and do what their answers ask for. Mutates."""
        core, book = self._core, self._book
        if not self:
            return
        now = core.roster.now()
        for load in [load for load in self._loads.values() if now > load.deadline]:
            core.counters.late_loads += 1
            self._give_up(load)
            self._ready(load)
        for load in [load for load in self._loads.values() if load.source is not None and not load.pull]:
            self._begin(load)
        oldest = core.flight.oldest
        landed = core.counters.steps if oldest is None else oldest.index - 1
        events = core.hooks.ask_transfer(book.take_wishes(landed))
        ended, stray = book.settle(events)
        core.counters.stray_events += stray
        if core.hooks.deaf or core.hooks.lost or core.hooks.silent:
            lost = book.abandon(None if core.hooks.deaf else [*core.hooks.lost, *book.told(core.hooks.silent)])
            ended += [(wish, TransferEvent(wish.id, "failed", reason="no connector answers for it")) for wish in lost]
        for wish, event in ended:
            self._end(wish, event)

    def _end(self, wish: Transfer, event: TransferEvent) -> None:
        if (load := self._probing.pop(wish.id, None)) is not None:
            self._answered(load, wish.id, event)
        elif (load := self._loading.pop(wish.id, None)) is not None:
            self._landed(load, wish, event)
        elif not self._outgoing.ended(wish, event):
            self._core.ready(wish.request_id, f"transfer {wish.id}")

    def _answered(self, load: Load, name: str, event: TransferEvent) -> None:
        """One source has looked. When all have, the one that has most is chosen, or nobody."""
        source = load.probes.pop(name)
        size = self._core.limits.page_size
        tokens = min(event.tokens // size, len(load.keys)) * size if event.kind == "found" else 0
        if event.kind == "failed" and load.awaited:
            self._core.counters.failed_loads += 1
            log.warning("request %s: its prefix could not be looked up: %s", load.request.id, event.reason)
        if tokens > load.upto:
            self._unwanted(load)
            load.source, load.upto, load.found, load.costs = source, tokens, name, event.costs
        elif event.kind == "found":
            self._unwanted(Load(load.request, [], 0.0, source=source, found=name))
        if load.probes:
            return
        if load.source is not None and load.awaited and self._worth(load, load.source):
            self._begin(load)
        else:
            self._unwanted(load)
            load.source = None
            self._ready(load)

    def _worth(self, load: Load, source: Connector) -> bool:
        """Whether it gives enough, and sooner than computing would; what is slower is cut off. Mutates ``load.upto``.

        Now and then all of it is tried all the same. What is held for the request was computed for it on purpose: that
        it is fetched is settled.
        """
        cached = self._core.kv.match(load.request).tokens
        least = cached + max(self._core.limits.page_size, source.min_tokens)
        if load.upto < least:
            return False
        self._chances += 1
        if source.holds or not self._chances % RETRY:
            return True
        upto = self._pace.worth(source, cached, load.upto, load.costs)
        self._core.counters.slow_loads += upto < load.upto
        load.upto = upto - upto % self._core.limits.page_size
        return load.upto >= least

    def _unwanted(self, load: Load) -> None:
        """What was found for it will not be loaded: whoever holds it for us is told. Mutates."""
        if load.source is not None and load.source.holds and load.found:
            self._book.decline(load.found, load.request.id, self._core.hooks.name(load.source))
        load.found = ""

    def _begin(self, load: Load) -> None:
        """Take pages for what is missing here, and have it loaded; tried again where there are none now."""
        core, kv, request = self._core, self._core.kv, load.request
        size, source = core.limits.page_size, load.source
        assert source is not None
        tokens = request.tokens[: load.upto]
        stand_in = Request(
            id=f"{request.id}/{KV}", tokens=tokens, num_prompt=len(tokens), params=request.params,
            max_total=len(tokens) + 1, namespace=request.namespace, adapter=request.adapter, salt=request.salt,
            priority=request.priority, packed=request.packed_tokens(0, load.upto), state=State.PARKED,
            prefill_target=load.upto, cache_ttl=request.cache_ttl,
        )  # fmt: skip
        stand_in.pages = kv.adopt(stand_in, kv.match(stand_in))
        load.first = len(stand_in.pages)
        need = load.upto // size - load.first
        if not core.arbiter.free_up(need, self):
            kv.release(stand_in, keep=0)
            return
        core.counters.evicted_pages += self.evicted
        self.evicted = 0
        taken = kv.take(stand_in, need)
        stand_in.pages.extend(taken)
        load.stand_in, load.pull, load.begun = stand_in, self._name(request), core.roster.now()
        self._loading[load.pull] = load
        keys = tuple(load.keys[load.first : load.upto // size])
        to = core.hooks.name(source)
        self.ask(Transfer(load.pull, "pull", request.id, tuple(taken), keys, to=to, hints=hints_of(request)))

    def _landed(self, load: Load, wish: Transfer, event: TransferEvent) -> None:
        """Publish what arrived, up to the first bad page, and let go of it."""
        core, kv, stand_in = self._core, self._core.kv, load.stand_in
        assert stand_in is not None
        whole = event.kind == "done" and not event.failed_pages
        good = len(wish.pages) if whole else _good(wish.pages, event.failed_pages)
        upto = (load.first + good) * core.limits.page_size
        stand_in.computed = stand_in.planned = stand_in.prefill_target = upto
        if good:
            pages = kv.publish(stand_in, upto).pages
            stand_in.pages = stand_in.pages if pages is None else pages
            core.counters.loaded_tokens += good * core.limits.page_size
        kv.release(stand_in, keep=upto)
        load.stand_in = None
        if whole and load.source is not None:
            tokens = len(wish.pages) * core.limits.page_size
            self._pace.loaded(load.source, core.roster.now() - load.begun, tokens)
        if event.kind == "failed":
            core.counters.failed_loads += 1
            log.warning(
                "request %s: %d of %d pages could not be loaded: %s",
                wish.request_id, len(wish.pages) - good, len(wish.pages), event.reason,
            )  # fmt: skip
        self._ready(load)

    def _give_up(self, load: Load) -> None:
        """Nobody waits for it any more. What the connectors were told of ends when they say so.

        What was found is declined also where it is being loaded: the load may not have been told of.
        """
        load.awaited = False
        for name in list(load.probes):
            if self._book.cancel(name):
                del self._probing[name], load.probes[name]
        self._unwanted(load)
        if load.pull and load.pull in self._book and self._book.cancel(load.pull):
            assert load.stand_in is not None
            self._core.kv.release(load.stand_in, keep=0)
            del self._loading[load.pull]

    def _ready(self, load: Load) -> None:
        if self._loads.pop(load.request, None) is not None:
            self._core.roster.ready(load.request.id, KV, front=True)

    # ---- what goes out

    def committed(self, plan: Plan, finished: Sequence[Request]) -> None:
        """Hand whole pages of prompts on as they are computed, and those of outputs at their end. Mutates."""
        if self._sources:
            self._pace.committed(self._core.roster.now(), plan.total_tokens, len(plan.requests))
            if not self._core.running:
                self._pace.paused()
        self._outgoing.committed(plan, finished)

    def _name(self, request: Request) -> str:
        self._names += 1
        return f"{request.id}#{self._names}"


def _good(pages: Sequence[int], failed: Sequence[int]) -> int:
    """Pages before the first bad one; none where it is not said which are bad."""
    bad = set(failed)
    return next((at for at, page in enumerate(pages) if page in bad), 0)
