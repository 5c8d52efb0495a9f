"""An auditor that believes no plugin: what the core can see of pages and requests must hold whatever ``check`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.core.loop import EngineCore
from engine.core.plan import EvictionPool, Outcome, Reject
from engine.core.request import Request


class Violation(AssertionError):
    """A plugin broke a rule. The message says what happened, not which rule: the suite's test says that."""


def audit_pages(core: EngineCore) -> None:
    """Pages in use belong to those that use them. Raises ``Violation``; believes neither cache nor scheduler."""
    held, size = core.pool.held, core.pool.page_size
    users: dict[int, tuple[Request, int]] = {}
    for request in (*core.running, *core.exchange.stand_ins()):
        for place, page in enumerate(request.pages):
            if page not in held:
                raise Violation(f"page {page} of {request!r} was given back to the pool while it is in use")
            other, where = users.setdefault(page, (request, place))
            if other is not request and not _same_content(other, request, where, place, size):
                raise Violation(f"page {page} belongs to {other.id} and to {request.id}, whose contents differ")
    numbers = core.kv.numbers()
    if numbers.pinned != len(users):
        raise Violation(f"{len(users)} pages are in use, and the cache counts {numbers.pinned} as pinned")
    if numbers.free != core.pool.num_free:
        raise Violation(f"{core.pool.num_free} pages are free, and the cache counts {numbers.free}")


def _same_content(one: Request, other: Request, where: int, place: int, size: int) -> bool:
    end = (place + 1) * size
    return where == place and one.namespace == other.namespace and one.tokens[:end] == other.tokens[:end]


def snapshot(core: EngineCore) -> dict[str, tuple[Any, ...]]:
    """All that hooks must not change of live requests (their two scratch slots left out)."""
    return {
        request.id: (
            len(request.tokens), request.tokens[-1], tuple(request.pages), request.state, request.computed,
            request.planned, request.priority, request.arrival, request.epoch, request.params, request.max_total,
            request.stop_ids, request.namespace, request.read_cache, request.drafts, request.pending,
            tuple(request.metadata.items()),
        )
        for request in core.requests.values()
    }  # fmt: skip


class HookGuard:
    """Stands between a core and its hooks: sees who is rejected, and that asking changes no request.

    Attributes:
        rejected: request id -> the words it was rejected with.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.rejected: dict[str, str] = {}
        hooks: Any = core.hooks
        self._order, self._admit, self._evict = hooks.ask_order, hooks.ask_admit, hooks.ask_evict
        self._commit = hooks.tell_commit
        hooks.ask_order, hooks.ask_admit, hooks.ask_evict = self._ask_order, self._ask_admit, self._ask_evict
        hooks.tell_commit = self._tell_commit

    def _watch(self, hook: str, ask: Callable[[], Any]) -> Any:
        before = snapshot(self._core)
        answer = ask()
        after = snapshot(self._core)
        if before != after:
            changed = next((name for name in before if before[name] != after.get(name)), "?")
            raise Violation(f"{hook!r} was asked, and request {changed} is another one since: requests are to read")
        return answer

    def _ask_order(self, step: Any, waiting: tuple[Request, ...]) -> Any:
        return self._watch("order", lambda: self._order(step, waiting))

    def _ask_admit(self, step: Any, request: Request) -> Any:
        answer = self._watch("admit", lambda: self._admit(step, request))
        if isinstance(answer, Reject):
            self.rejected[request.id] = answer.reason
        return answer

    def _ask_evict(self, need: Callable[[], int], pool: EvictionPool) -> Iterator[Sequence[object]]:
        answers = self._evict(need, pool)
        while (keys := self._watch("evict", lambda: next(answers, None))) is not None:
            yield keys

    def _tell_commit(self, outcome: Outcome) -> None:
        self._watch("commit", lambda: self._commit(outcome))
