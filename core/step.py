"""``Step``: the pen that the core lends to the scheduler for one step. It alone changes state, and it keeps the rules.

Rules it keeps, whatever is asked of it: every granted token is backed by a page; the sum of tokens never exceeds the
budget; an order is a subset of the queue; a victim's grant of this very step is revoked and its budget returned; what a
revoked or failed grant had published can never be matched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from engine.core.errors import InvariantViolation
from engine.core.journal import Journal
from engine.core.plan import NO_DRAFT, KVNumbers, Plan, Reject, Room, Why
from engine.core.protocols import Match
from engine.core.request import Request, State
from engine.core.rows import Rows
from engine.core.view import StepView

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

Decide = Callable[[Room], "int | Why"]
"""A scheduler's check of a candidate: how many tokens to grant it, or why none."""


class Step:
    """One step being planned. Made by the core, dead once sealed.

    Attributes:
        index: number of the step.
        budget: tokens that may still be granted.
        refused: why the last ``grant`` or ``start`` gave nothing.
        taken: pages taken for grants of this step so far.
        override: True when the core asks again after an empty plan: objections of policies are ignored, and a
            scheduler should let the head of the queue in if it fits at all.
    """

    __slots__ = (
        "_asked",
        "_core",
        "_deferred",
        "_deferred_pages",
        "_early",
        "_kv",
        "_overlap",
        "_prefilled",
        "_published",
        "_rows",
        "_size",
        "_waits",
        "admitted",
        "budget",
        "evicted",
        "index",
        "journal",
        "override",
        "plan",
        "preempted",
        "refused",
        "taken",
    )

    def __init__(self, core: EngineCore, index: int, *, override: bool = False) -> None:
        self._core = core
        self._kv = core.kv
        self._early = core.kv.publish_when == "planned"
        self._overlap = core.flight.overlap
        self._size = core.limits.page_size
        self.index = index
        self.budget = core.limits.max_batch_tokens
        self.override = override
        self.refused: Why | None = None
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.evicted = 0
        self.taken = 0
        self.journal = Journal()
        self._rows = Rows()
        self._prefilled = core.kv.publish_when == "prefilled"
        self._published: set[Request] = set()  # prompts in progress that were published in this step
        self._deferred: dict[Request, int] = {}  # pages granted but not taken yet
        self._deferred_pages = 0
        self._waits: dict[str, tuple[Why, str]] = {}
        self._asked = False
        self.plan: Plan | None = None

    # ---- to read

    @property
    def view(self) -> StepView:
        """What policies see of it. A new one each time: a step that had one would be garbage that has to be collected,
        and keep its requests until then."""
        return StepView(self)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages, in order of admission. The list itself: copy it before changing any."""
        return self._core.running

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return len(self._core.waiting)

    @property
    def slots(self) -> int:
        """How many more requests may start."""
        return self._core.limits.max_running - len(self._core.running)

    @property
    def kv(self) -> KVNumbers:
        """Page counts at this moment."""
        return self._kv.numbers()

    @property
    def available(self) -> int:
        """Pages that a grant could take now: free and evictable ones. The same as ``kv.available``, at less cost."""
        return self._kv.available()

    @property
    def tokens_planned(self) -> int:
        """Tokens granted so far."""
        return self._core.limits.max_batch_tokens - self.budget

    def granted(self, request: Request) -> int:
        """Tokens that the request was granted in this step."""
        return self._rows.granted(request)

    def cached(self, request: Request) -> int:
        """Length of the request's cached prefix in tokens, looked up once a step. Pins nothing."""
        return self._core.arbiter.cached(request)

    def prefix(self, request: Request) -> Match:
        """What the cache has of all the request's tokens (``KVCache.probe``), looked up once a step. Pins nothing."""
        return self._core.arbiter.prefix(request)

    @property
    def caching(self) -> bool:
        """Whether the KV cache remembers prefixes at all."""
        return self._kv.caching

    def queue(self) -> Iterator[Request]:
        """Waiting requests, after ``order`` and ``admit``, lazily. Start them or not; stop when you like."""
        core = self._core
        if self.plan is not None:
            return
        self._asked = True
        for request in core.arbiter.order(self):
            if request.state is not State.WAITING:
                continue
            objection = core.hooks.ask_admit(self, request)
            if objection is None:
                yield request
            elif isinstance(objection, Reject):
                core.fail(request, objection.reason)
            elif self.override:
                yield request
            else:
                self.note(request, Why.POLICY, objection.reason)

    # ---- to write

    def note(self, request: Request, why: Why, words: str = "") -> None:
        """Record why a request got nothing in this step. The last note stands."""
        self._waits[request.id] = (why, words)

    def grant(self, request: Request, tokens: int, lookahead: int = 0, *, defer: bool = False) -> int:
        """Plan up to ``tokens`` more tokens of a running request; returns how many, 0 with ``step.refused`` set.

        Never more than its debt (its drafts come last) or the budget; drafts that do not fit are forgotten. Pages are
        taken, asking ``evict`` (kind ``cache``) when short; ``lookahead`` asks for pages for so many tokens more.
        ``defer`` as for ``start``.
        """
        count = min(tokens, request.debt, self.budget)
        if count <= 0:
            return self._refuse(request, Why.TOKEN_BUDGET if self.budget <= 0 else Why.NOTHING_OWED)
        if request.state is not State.RUNNING or self.plan is not None:
            return self._refuse(request, Why.NOTHING_OWED)
        if self._prefilled and request.computed < request.prefill_target:
            self.publish(request)
        upto = request.planned + count
        short = self._kv.short(request, self._reach(upto, lookahead)) - self._deferred.get(request, 0)
        if short > 0 and not self._take(request, short, defer=defer):
            return self._refuse(request, Why.PAGES)
        self._record(request, count, upto)
        return count

    def grant_decodes(self, requests: Sequence[Request], first: int = 0) -> int:
        """``grant(request, 1)`` for ``requests[first:]`` as long as they decode (owe one token) and are granted.

        Returns the index of the first that was not: one that owes more, does not run, or was refused. The fast way
        through the steady state: a request that stays inside its last page costs no call.
        """
        if self.plan is not None:
            return first
        rows = self._rows
        row, start_at, partial = rows.requests.append, rows.starts.append, rows.partial
        end = min(len(requests), first + self.budget)
        self._provide(requests, first, end)
        for index in range(first, end):
            request = requests[index]
            start = request.planned
            if (
                len(request.tokens) + request.pending - start != 1
                or (partial and request in partial)
                or (start >= request.quiet and not self._cross(request, start))
            ):
                end = index
                break
            row(request)
            start_at(start)
            request.planned = start + 1
        self.budget -= rows.even_out()
        return end

    def expire(self, *, waiting: float | None = None, running: float | None = None) -> None:
        """End, as aborted, requests that took too long. Those granted something in this step are left alone.

        Args:
            waiting: seconds since it came, for those that have not started yet.
            running: seconds since it first started, for all others, preempted ones included.
        """
        core, now = self._core, self._core.roster.now()
        if waiting is not None:
            for request in [r for r in core.waiting if r.started is None and now - r.arrival > waiting]:
                core.abort(request.id, detail=f"it waited for more than {waiting:g} seconds")
        if running is not None:
            for request in [*core.running, *core.waiting]:
                if request.started is not None and now - request.started > running and not self.granted(request):
                    core.abort(request.id, detail=f"it ran for more than {running:g} seconds")

    def publish(self, request: Request) -> None:
        """Make the computed part of a prompt in progress matchable, if its cache keeps that for the next chunk.

        ``grant`` does it too; call it where the queue must see it already. Does nothing for other requests.
        """
        if not self._prefilled or request in self._published or request.state is not State.RUNNING:
            return
        if not request.write_cache:
            return
        if 0 < request.computed < request.prefill_target:
            self._published.add(request)
            pages = self._kv.publish(request, request.computed).pages
            if pages is not None:
                request.pages = pages

    def start(
        self, request: Request, tokens: int | Decide, *, lookahead: int = 0, padding: int = 0, defer: bool = False
    ) -> int:
        """Admit a waiting request: look its prefix up, check, pin, take pages. One transaction; all or nothing.

        Args:
            request: a candidate of ``queue()``.
            tokens: most tokens to grant it, or a function of the ``Room`` that there is to the number to grant or to
                why none. The function sees the page counts before and after the pin.
            lookahead: pages for so many tokens more.
            padding: it may be granted so many tokens more than it owes, as drafts that never match.
            defer: take the pages at ``take_deferred`` or when the step is sealed, so that candidates that come later
                still find what would be evicted for this one. That there are pages enough is certain now. Caches
                that publish when planned need the pages at once and get them.

        Returns the tokens granted (after the cached prefix), 0 with ``step.refused`` set and nothing changed.
        """
        core = self._core
        if request.state is not State.WAITING or self.plan is not None:
            return self._refuse(request, Why.NOTHING_OWED)
        if len(core.running) >= core.limits.max_running:
            return self._refuse(request, Why.RUN_SLOTS)
        match = core.arbiter.match(request)
        hit, size = match.tokens, self._size
        if hit % size or not 0 <= hit < len(request.tokens):
            self._blame(f"found {hit} tokens of {len(request.tokens)}: whole pages, and never the last token")
        owed, available = len(request.tokens) - hit, self._kv.available()
        answer = tokens if isinstance(tokens, int) else tokens(Room(hit, owed, available, match.idle, size))
        if isinstance(answer, Why):
            return self._refuse(request, answer)
        count = min(answer, owed + (padding if request.pooling is None else 0), self.budget)
        if count <= 0:
            return self._refuse(request, Why.TOKEN_BUDGET)
        upto = hit + count
        short = -(-self._reach(upto, lookahead) // size) - hit // size
        if short > available - match.idle - self._deferred_pages:
            return self._refuse(request, Why.PAGES)
        request.pages = self._kv.adopt(request, match)
        if len(request.pages) * size != hit:
            self._blame(f"pinned {len(request.pages)} pages of a prefix of {hit} tokens")
        if short > 0 and not self._take(request, short, defer=defer):
            self._kv.release(request, keep=0)
            request.pages = []
            return self._refuse(request, Why.PAGES)
        if self._early:
            for step in (self, *core.flight.steps()):
                step.journal.adopt(request, request.pages[: hit // size])
        core.enter(request, hit)
        request.drafts = (NO_DRAFT,) * (count - owed) if count > owed else ()
        self.admitted.append(request)
        self._waits.pop(request.id, None)
        self._record(request, count, upto)
        return count

    def free_up(self, pages: int) -> bool:
        """Evict idle content until ``pages`` are free, or nothing is left to evict. True if so many are free."""
        pool = self._core.pool
        if pages > pool.num_free:
            self._core.arbiter.free_up(min(pages, self._kv.available()), self)
        return pages <= pool.num_free

    def take_deferred(self) -> None:
        """Take the pages of all deferred grants. Sealing does it too."""
        deferred, self._deferred, self._deferred_pages = self._deferred, {}, 0
        for request, count in deferred.items():
            if self._take(request, count):
                self._calm(request, request.planned)
            else:  # only where a plugin's eviction freed less than it counted
                self.preempt(victim=request)

    def preempt(
        self, needy: Request | None = None, victim: Request | None = None, *, front: bool = True
    ) -> Request | None:
        """Make a running request give up its pages and wait again; returns it, or ``None`` if there is nobody.

        Asks ``evict`` (kind ``running``) unless ``victim`` is given. A grant that the victim had in this step is
        revoked and its tokens return to the budget.

        Args:
            needy: on whose behalf; it may turn out to be the victim itself.
            victim: choose this one without asking.
            front: queue the victim at the front (it was there first) or at the back.
        """
        core = self._core
        chosen = victim if victim is not None else core.arbiter.choose_victim(self, needy)
        if chosen is None or not self.may_preempt(chosen):
            return None
        self._revoke(chosen)
        core.give_up(chosen, front=front)
        if chosen in self.admitted:
            self.admitted.remove(chosen)
        self.preempted.append(chosen)
        self.note(chosen, Why.PAGES, "preempted" if needy is None else f"preempted for {needy.id}")
        return chosen

    def may_preempt(self, request: Request) -> bool:
        """True where the request runs and nobody depends on what it computes in this step."""
        return request.state is State.RUNNING and not self.journal.is_adopted(request) and self.plan is None

    def seal(self, mode: str = "mixed", *, otherwise: Why | None = None, drafting: int = 0) -> Plan:
        """Close the step: the immutable plan, with a reason for every request that waits. Call it once, last.

        Args:
            mode: the scheduler's word for the batch.
            otherwise: the reason of waiting requests that were not looked at.
            drafting: drafts that the executor will propose for each row that samples. They matter in overlap mode,
                where the next step is planned before they are known; else they come with the outcome.

        Raises:
            InvariantViolation: the step is sealed already.
        """
        if self.plan is not None:
            raise InvariantViolation("a step is sealed once")
        self.take_deferred()
        rows, requests = self._rows, self._rows.requests
        awaits = self._core.flight.expect(requests, rows.samples, rows.drafts, drafting) if self._overlap else ()
        self.plan = Plan(
            index=self.index,
            requests=tuple(requests),
            epochs=tuple([request.epoch for request in requests]),
            starts=tuple(rows.starts),
            counts=tuple(rows.counts),
            samples=tuple(rows.samples),
            tables=tuple([request.pages for request in requests]),
            admitted=tuple(self.admitted),
            preempted=tuple(self.preempted),
            evicted_pages=self.evicted,
            waits=self._waits,
            otherwise=otherwise or (Why.BEHIND if self._asked else Why.NOT_ASKED),
            mode=mode if requests else "idle",
            page_size=self._size,
            cuts=rows.cuts,
            drafts=rows.drafts,
            pooled=rows.pooled(),
            awaits=awaits,
        )
        return self.plan

    # ---- inside

    def _refuse(self, request: Request, why: Why) -> int:
        self.refused = why
        if request.state is State.WAITING:
            self._waits[request.id] = (why, "")
        return 0

    def _provide(self, requests: Sequence[Request], first: int, end: int) -> None:
        """Make room at once for all that need a page to decode, if there is so much; pages of one token are taken, too.

        What is evicted is what one after the other would evict, in the same order.
        """
        each = self._size == 1 and not self._early
        if not each and self._core.pool.num_free >= end - first:
            return
        needy = self._at_edges(requests, first, end)
        count = len(needy)
        if count < 2 or (self._deferred and count > self._kv.available() - self._deferred_pages):
            return
        if self._core.arbiter.free_up(count, self) and each:
            self.taken += count
            for request, page in zip(needy, self._given(self._kv.take_each(needy), count), strict=True):
                request.pages.append(page)
                request.quiet = min(len(request.pages), request.max_total - 1)

    def _at_edges(self, requests: Sequence[Request], first: int, end: int) -> list[Request]:
        """Those of ``requests[first:end]`` that need a page to decode, up to the first that ``_cross`` refuses."""
        needy = []
        size, partial, deferred = self._size, self._rows.partial, self._deferred
        for index in range(first, end):
            request = requests[index]
            planned = request.planned
            if len(request.tokens) + request.pending - planned != 1 or (partial and request in partial):
                break
            if planned < request.quiet:
                continue
            if request.state is not State.RUNNING or request.drafts:
                break
            if len(request.pages) * size > planned:
                continue
            if (request.pending and not request.debt) or request in deferred or request.pooling is not None:
                break
            needy.append(request)
        return needy

    def _cross(self, request: Request, start: int) -> bool:
        """Prepare a decode at the edge of a page: take one, or publish one; False where it cannot be granted so."""
        if request.state is not State.RUNNING or request.drafts or (request.pending and not request.debt):
            return False
        if request in self._deferred or request.pooling is not None:
            return False
        self.budget -= self._rows.even_out()
        if start >= len(request.pages) * self._size and not self._take(request, 1):
            self._refuse(request, Why.PAGES)
            return False
        if self._early:
            self._publish(request, start, min(start + 1, len(request.tokens)))
        self._calm(request, start + 1)
        return True

    def _record(self, request: Request, count: int, upto: int) -> None:
        """Add to the plan, to the request's progress, and to what may be matched."""
        self.budget -= count
        self._rows.add(request, count, Why.TOKEN_BUDGET if self.budget <= 0 else Why.PREFILL_BUDGET)
        if self._early:
            self._publish(request, upto - count, min(upto, len(request.tokens)))
        if request not in self._deferred:
            self._calm(request, upto)

    def _calm(self, request: Request, upto: int) -> None:
        """Mark the positions from ``upto`` on whose decode needs no page and, planned, publishes none."""
        size = self._size
        end = len(request.pages) * size
        if self._early and (upto < len(request.tokens) or not self._overlap):  # the last token of a page completes it
            end = min(end, upto + (size - 1 - upto % size))
        request.quiet = min(end, request.max_total - 1)

    def _publish(self, request: Request, start: int, upto: int) -> None:
        """Publish the pages that known tokens fill up to ``upto``, of which this step computes those from ``start`` on.

        Drafts may be rejected: they are never published. Pages that end before ``start`` are not this step's to take
        back: accepted drafts completed them, or the step in flight computes them.
        """
        if not request.write_cache:
            return
        size = self._size
        before = start - request.pending
        if request.lagging or min(start, upto) // size > before // size:
            request.lagging = False
            self._enter(request, self._core.flight.last, before, min(start, upto))
            before = start
        if upto // size > before // size:
            self._enter(request, self, before, upto)

    def _enter(self, request: Request, step: Step | None, before: int, upto: int) -> None:
        """Publish up to ``upto``; ``step`` computes what lies beyond ``before`` (``None``: it is computed)."""
        publication = self._kv.publish(request, upto)
        if publication.keys and step is not None:
            step.journal.enter(request, publication.keys, request.pages[before // self._size : upto // self._size])

    def _reach(self, upto: int, lookahead: int) -> int:
        """Tokens to have pages for: no sequence grows beyond the model's length."""
        return min(upto + lookahead, self._core.limits.max_model_len) if lookahead else upto

    def _take(self, request: Request, count: int, *, defer: bool = False) -> bool:
        if (defer or self._deferred) and count > self._kv.available() - self._deferred_pages:
            return False
        if defer and not self._early:
            self._deferred[request] = self._deferred.get(request, 0) + count
            self._deferred_pages += count
            return True
        if not self._core.arbiter.free_up(count, self):
            return False
        request.pages.extend(self._given(self._kv.take(request, count), count))
        self.taken += count
        return True

    def _given(self, pages: list[int], count: int) -> list[int]:
        if len(pages) != count:
            self._blame(f"gave {len(pages)} pages where {count} were asked for")
        return pages

    def _blame(self, what: str) -> NoReturn:
        """The cache broke its word: nothing that is decided on it could be right."""
        raise InvariantViolation(f"kvcache {self._kv.name!r} of {self._kv.origin} {what}")

    def _revoke(self, request: Request) -> None:
        count = self._rows.drop(request)
        if not count:
            return
        self._deferred_pages -= self._deferred.pop(request, 0)
        self.budget += count
        self._kv.unpublish(self.journal.take_back(request))
