"""KV to outside: whole pages are handed to the connectors that keep them, as they are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.plan import Plan, Transfer, TransferEvent
from engine.core.protocols import Connector
from engine.core.request import Finish, Request, State
from engine.core.transfers import TransferBook, hints_of

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Chain:
    """The keys of a request's pages, and how many of them each sink was given."""

    keys: list[bytes] = field(default_factory=list)
    saved: dict[Connector, int] = field(default_factory=dict)


class Outgoing:
    """What goes out. ``len()`` is the number of transfers that are open.

    Args:
        sinks: who keeps it.
        name: a new name for a transfer of a request.
    """

    def __init__(
        self, core: EngineCore, sinks: Sequence[Connector], book: TransferBook, name: Callable[[Request], str]
    ) -> None:
        self._core, self._sinks, self._book, self._name = core, sinks, book, name
        self._open: dict[str, tuple[Connector, int]] = {}  # transfer id -> for whom, and how many pages
        self._chains: dict[Request, Chain] = {}
        self._said: dict[Connector, str] = {}  # why the last transfer to it failed: told once

    def __len__(self) -> int:
        return len(self._open)

    def reset(self) -> None:
        """The keys of all content have changed. Mutates."""
        self._chains.clear()

    def forget(self, request: Request) -> None:
        """The request ended. What was handed on stays with the sinks. Mutates."""
        self._chains.pop(request, None)

    def committed(self, plan: Plan, finished: Sequence[Request]) -> None:
        """Hand whole pages of prompts on as they are computed, and those of outputs at their end. Mutates."""
        if not self._sinks:
            return
        if plan.total_tokens > len(plan.requests):  # else all of them decode
            for request in plan.requests:
                if request.state is State.RUNNING and request.computed <= request.prefill_target:
                    self._save(request)
        for request in finished:
            if request.finish is not Finish.ERROR:
                self._save(request)

    def ended(self, wish: Transfer, event: TransferEvent) -> bool:
        """A transfer has ended; False if it was none of these. Mutates."""
        sink, _ = self._open.pop(wish.id, (None, 0))
        if sink is None:
            return False
        before = self._said.pop(sink, "")
        if event.kind == "failed":
            self._core.counters.failed_saves += 1
            self._said[sink] = event.reason
            if event.reason != before:
                log.warning("request %s: its KV was not saved: %s", wish.request_id, event.reason)
        return True

    def _save(self, request: Request) -> None:
        """Hand on the whole pages that each sink has not been given yet, as far as its share of the pool goes."""
        if not request.write_cache:
            return
        core, size = self._core, self._core.limits.page_size
        full = min(request.computed, request.num_tokens) // size
        chain = self._chains.setdefault(request, Chain())
        for sink in self._sinks:
            if request.cache_ttl is not None and not sink.holds:  # no store forgets in time
                continue
            first = chain.saved.get(sink, 0)
            if full <= first:
                continue
            fenced = sum(pages for other, pages in self._open.values() if other is sink)
            room = max(0, int(core.pool.num_pages * sink.saving_share) - fenced)
            upto = min(full, first + room)
            core.counters.unsaved_pages += full - upto
            if upto <= first:
                continue
            request.digest_pages(chain.keys, upto, size)
            name = self._name(request)
            self._open[name] = sink, upto - first
            pages, keys = tuple(request.pages[first:upto]), tuple(chain.keys[first:upto])
            to = core.hooks.name(sink)
            self._book.ask(Transfer(name, "push", request.id, pages, keys, to=to, hints=hints_of(request)))
            chain.saved[sink] = upto
