"""The six hooks. Everything else in the engine is either a plugin that answers them or the core that asks them.

One step is ``plan → execute → commit``, for ever. Four hooks make the plan and apply it (``plan``, ``order``,
``admit``, ``commit``), ``evict`` finds memory, ``transfer_kv`` moves it. A hook is asked once a step, or once per
request *tried*; never per running request. Implementations may leave out parameters that they do not need.

Order of asking: the last registered is asked first. The core registers the scheduler, then the KV cache, the
connectors, and the policies so that the first policy in the configuration is asked first. A ``firstresult`` hook stops
at the first answer that is not ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from engine.core.plan import EvictionPool, Outcome, Plan, Reject, Transfer, TransferEvent, Wait
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.step import Step
    from engine.core.view import StepView

PROJECT = "engine"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def plan(step: Step) -> Plan | None:
    """Decide what the step computes. The protocol hook: it asks ``order``, ``admit`` and ``evict`` through ``step``.

    Called once a step by the loop; stops at the first non-None result. Answered by the selected scheduler.

    In the order in which a typical scheduler causes them:

    1. ``step.grant(request, n)`` for running requests, which asks ``evict(pool.kind="cache")`` when pages are short;
    2. ``step.preempt(request)`` when a grant is refused, which asks ``evict(pool.kind="running")``;
    3. ``step.queue()``, which asks ``order`` once and ``admit`` per candidate;
    4. ``step.start(candidate, n)``, which matches and pins its cached prefix and asks ``evict`` like ``grant``;
    5. ``return step.seal()``.

    Only ``step`` changes anything, and it refuses what would break an invariant.

    :param step: the core's pen for this step.
    :returns: the plan that ``step.seal()`` gave. Any other plan is refused.

    Example::

        class Serial(Scheduler):
            name = "serial"

            @hookimpl
            def plan(self, step):
                for request in list(step.running):
                    if not step.grant(request, step.budget) and step.refused is Why.PAGES:
                        step.preempt(victim=request)  # a transfer holds pages back: it starts again
                if not step.running and not step.preempted:
                    for request in step.queue():
                        if step.start(request, step.budget):
                            break
                return step.seal()
    """


@hookspec(firstresult=True)
def order(step: Step | StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
    """Order the waiting requests, or leave some out for this step.

    Called by ``step.queue()`` at most once a step, over a bounded window (the front of the queue); stops at the first
    non-None result. Answered by policies, else by the scheduler.

    The queue keeps the new order, so a stable sort is stable over steps. Requests left out keep their places behind
    and wait with reason ``order``. Ordering promises nothing: admission comes after.

    :param step: to read (``step.cached(request)`` is the prefix-match length, memoised). Policies get a read-only view.
    :param waiting: the requests in the queue's present order.
    :returns: the same requests in another order, or a subset; ``None`` leaves the order as it stands. An answer with
        unknown or repeated requests is ignored and counted against the plugin.

    Example::

        class ShortestFirst(Policy):
            name = "shortest-first"

            @hookimpl
            def order(self, waiting):
                return sorted(waiting, key=lambda request: request.num_tokens)
    """


@hookspec(firstresult=True)
def admit(step: Step | StepView, request: Request) -> Wait | Reject | None:
    """Object to a request being started now.

    Called by ``step.queue()`` for each candidate that the scheduler is about to try; stops at the first objection: a
    chain of vetoes. Answered by the scheduler, connectors and policies.

    When nothing runs and nothing was granted although work exists, objections of kind ``Wait`` are overridden.

    :param step: to read. Policies get a read-only view.
    :param request: the candidate.
    :returns: ``None`` for no objection, ``Wait(reason)`` for not now, ``Reject(reason)`` to end the request.

    Example::

        class OneEach(Policy):
            name = "one-each"

            @hookimpl
            def admit(self, step, request):
                tenant = request.metadata.get("tenant")
                if any(r.metadata.get("tenant") == tenant for r in step.running):
                    return Wait(f"tenant {tenant} already runs one")
    """


@hookspec
def evict(need: int, pool: EvictionPool) -> Sequence[object] | None:
    """Choose what to give up when pages are short.

    Called by the core on shortage, in batches. An answer that gives up too little is followed by the next one's, the
    defaults last. With ``pool.kind == "cache"`` the KV cache's default drops its least recently used content; with
    ``"running"`` the scheduler's default picks whom to preempt.

    :param need: pages that must become available. A longer answer is fine: only as much as is needed is given up.
    :param pool: what there is to choose from.
    :returns: keys of candidates, best first; ``None`` leaves the choice to the next. Keys are validated again, and
        the defaults fill any remainder.

    Example::

        class DropLargest(Policy):
            name = "drop-largest"

            @hookimpl
            def evict(self, need, pool):
                if pool.kind == "cache":
                    return [c.key for c in sorted(pool.candidates(), key=lambda c: -c.pages)]
    """


@hookspec
def commit(outcome: Outcome) -> None:
    """A step's results have been applied: keep your books.

    Called once a step after tokens were appended and finished requests marked, before their pages are released. All
    implementations are called: the KV cache first, then the scheduler, then everyone else. Results of requests that
    were preempted or aborted meanwhile are in ``outcome.dropped`` and must be ignored.

    :param outcome: the plan, its tokens, and who finished.

    Example::

        class CountTokens(Policy):
            name = "count-tokens"
            total = 0

            @hookimpl
            def commit(self, outcome):
                self.total += sum(map(len, outcome.tokens))
    """


@hookspec
def transfer_kv(transfers: Sequence[Transfer]) -> Sequence[TransferEvent] | None:
    """Move KV pages between this engine and elsewhere, and say what became of earlier transfers.

    Called by the loop at most once a step, when something moves: new transfers are asked for or old ones are open. All
    implementations are called, and must not block. Answered by connectors.

    :param transfers: new wishes since the last call; often empty while older ones are open.
    :returns: events of any open transfer. Events of unknown or ended transfers are counted and dropped.

    Example::

        class Recorder(Connector):
            name = "recorder"

            @hookimpl
            def transfer_kv(self, transfers):
                return [TransferEvent(t.id, "failed", reason="nothing is stored here") for t in transfers]
    """
