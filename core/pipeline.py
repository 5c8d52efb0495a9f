"""Executing plans in order: at once in ``sync`` mode, beside the planning of the next one in ``overlap`` mode."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.core.errors import ExecutionError
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor

log = logging.getLogger(__name__)

Answer = Callable[[], Outcome]


class Pipeline:
    """Hands plans to the executor, one after the other, and gives back their outcomes in the same order.

    Args:
        executor: whose ``launch`` is called, never twice at once. Its answers are waited for in order, in the caller's
            thread.
        background: call it in a thread of its own; ``launch`` then returns before the plan is computed.
    """

    def __init__(self, executor: Executor, *, background: bool) -> None:
        self._executor = executor
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="executor") if background else None
        self._launched: deque[Future[Answer]] = deque()
        self._failed = False

    def launch(self, plan: Plan) -> None:
        """Begin to compute a plan. What goes wrong is raised by ``collect``. Mutates."""
        if self._worker is not None:
            self._launched.append(self._worker.submit(self._run, plan))
            return
        future: Future[Answer] = Future()
        try:
            future.set_result(self._run(plan))
        except Exception as error:
            future.set_exception(error)
        self._launched.append(future)

    def collect(self) -> Outcome:
        """The outcome of the oldest plan launched, once it is there. Raises what the executor raised. Mutates."""
        return self._launched.popleft().result()()

    def abandon(self) -> None:
        """Forget plans that are not collected, after the executor let go of them; it may be used again. Mutates."""
        while self._launched:
            future = self._launched.popleft()
            if future.exception() is None:
                _let_end(future.result())
        self._failed = False

    def close(self) -> None:
        """Wait for what is being computed, then stop. Idempotent."""
        self.abandon()
        if self._worker is not None:
            self._worker.shutdown()

    def _run(self, plan: Plan) -> Answer:
        if self._failed:  # it may continue rows of the plan that failed
            raise ExecutionError("the step before failed")
        try:
            return self._executor.launch(plan)
        except BaseException:
            self._failed = True
            raise


def _let_end(answer: Answer) -> None:
    """Wait until a step is over whose outcome nobody wants: it was planned after one that failed."""
    try:
        answer()
    except Exception as error:
        log.debug("a step that was given up has failed too: %s", error)
