"""Executing plans in order: at once in ``sync`` mode, beside the planning of the next one in ``overlap`` mode."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from engine.core.errors import ExecutionError
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor


class Pipeline:
    """Hands plans to the executor, one after the other, and gives back their outcomes in the same order.

    Args:
        executor: whose ``execute`` is called, never twice at once.
        background: call it in a thread of its own; ``launch`` then returns before the plan is computed.
    """

    def __init__(self, executor: Executor, *, background: bool) -> None:
        self._executor = executor
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="executor") if background else None
        self._launched: deque[Future[Outcome]] = deque()
        self._failed = False

    def launch(self, plan: Plan) -> None:
        """Begin to compute a plan. What goes wrong is raised by ``collect``. Mutates."""
        if self._worker is not None:
            self._launched.append(self._worker.submit(self._run, plan))
            return
        future: Future[Outcome] = Future()
        try:
            future.set_result(self._run(plan))
        except Exception as error:
            future.set_exception(error)
        self._launched.append(future)

    def collect(self) -> Outcome:
        """The outcome of the oldest plan launched, once it is there. Raises what the executor raised. Mutates."""
        return self._launched.popleft().result()

    def abandon(self) -> None:
        """Forget plans that are not collected, after the executor let go of them; it may be used again. Mutates."""
        while self._launched:
            self._launched.popleft().exception()
        self._failed = False

    def close(self) -> None:
        """Wait for what is being computed, then stop. Idempotent."""
        self.abandon()
        if self._worker is not None:
            self._worker.shutdown()

    def _run(self, plan: Plan) -> Outcome:
        if self._failed:  # it may continue rows of the plan that failed
            raise ExecutionError("the step before failed")
        try:
            return self._executor.execute(plan)
        except BaseException:
            self._failed = True
            raise
