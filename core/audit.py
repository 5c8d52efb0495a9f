"""The full audit: what must be true between any two operations. Used by tests, by ``audit`` mode, and when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.errors import InvariantViolation
from engine.core.request import State

if TYPE_CHECKING:
    from engine.core.loop import EngineCore


def check(core: EngineCore) -> None:
    """Raise ``InvariantViolation`` where requests, queue, pages and cache disagree. Does not mutate."""
    _requests(core)
    _tables(core)
    core.pool.check()
    core.kv.check([*core.running, *core.exchange.stand_ins()])
    _numbers(core)
    core.cache.check()


def _fail(what: str) -> None:
    raise InvariantViolation(what)


def _requests(core: EngineCore) -> None:
    homes = [*core.running, *core.waiting, *core.parked.values()]
    if len({id(request) for request in homes}) != len(homes):
        _fail("a request is in two places at once")
    if {request.id for request in homes} != set(core.requests):
        _fail(f"requests lost or forgotten: {sorted({request.id for request in homes} ^ set(core.requests))[:8]}")
    for group, state in (
        (core.running, State.RUNNING),
        (core.waiting, State.WAITING),
        (core.parked.values(), State.PARKED),
    ):
        for request in group:
            if request.state is not state:
                _fail(f"{request!r} stands among the {state}")
    for request in homes:
        if request.num_tokens >= request.max_total and request.pooling is None:
            _fail(f"{request!r} has all its tokens and has not ended")
        if request.tokens[-1] in request.stop_ids and request.num_output >= max(1, request.params.min_tokens):
            _fail(f"{request!r} was stopped by a token and has not ended")
    if len(core.running) > core.limits.max_running:
        _fail(f"{len(core.running)} requests run, at most {core.limits.max_running} may")


def _tables(core: EngineCore) -> None:
    size = core.limits.page_size
    if len({id(request.pages) for request in core.running}) != len(core.running):
        _fail("two requests have one page table")
    for request in core.running:
        if max(request.planned, request.quiet) > len(request.pages) * size:
            _fail(f"{request!r} has tokens without a page")
        if request.computed > request.num_tokens or request.in_flight < 0:
            _fail(f"{request!r} computed more than it knows")
        if request.pending < 0:
            _fail(f"{request!r} yielded more tokens than were planned")
        if request.quiet > request.planned and (request.drafts or request.lagging):
            _fail(f"{request!r} has drafts to plan or pages to publish, and is passed over")
        if len(set(request.pages)) != len(request.pages):
            _fail(f"{request!r} has a page twice")
    for request in core.waiting:
        if request.pages or request.planned or request.pending or request.quiet:
            _fail(f"{request!r} waits and holds pages")


def _numbers(core: EngineCore) -> None:
    numbers = core.kv.numbers()
    fenced = core.pool.num_fenced
    if (
        numbers.free + numbers.evictable + numbers.pinned + fenced != numbers.total
        or numbers.total != core.pool.num_pages
    ):
        _fail(f"page counts do not add up: {numbers}, {fenced} fenced")
    if core.kv.available() != numbers.available:
        _fail(f"the cache says that {core.kv.available()} pages are available, and counts {numbers}")
    if not core.running and numbers.pinned and not any(core.exchange.stand_ins()):
        _fail(f"{numbers.pinned} pages are pinned although nothing runs")
