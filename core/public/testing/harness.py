"""Drive an engine by hand, step by step: plan, see what was planned, commit the tokens that you choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.plan import Delta, Outcome, Plan, Why
from engine.core.request import Request, SamplingParams
from engine.testing.executors import ShadowExecutor
from engine.testing.making import make_core


class Harness:
    """An engine core around a model that says what you choose, and whose KV memory sees every wrong read.

    Example::

        harness = Harness(scheduler="unified", num_pages=8, page_size=4)
        harness.add([1, 2, 3], request_id="a")
        harness.plan()
        assert harness.rows == {"a": 3}
        harness.commit({"a": 7})
        assert harness.outputs["a"] == [7]

    Attributes:
        core: the engine core, to look at.
        outputs: request id -> its output so far.
        ended: request id -> how it ended.
    """

    def __init__(self, *, overlap: bool = False, **settings: Any) -> None:
        """Any argument of ``make_core``, except ``executor``."""
        self._chosen: Mapping[str, Sequence[int]] = {}
        self._first: dict[str, int] = {}  # request id -> its output when the step that is computed began
        self.executor = ShadowExecutor(self._next)
        self.core = make_core(executor=self.executor, overlap=overlap, **settings)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self._plans: deque[Plan] = deque()
        self._last: Plan | None = None

    def add(self, tokens: Sequence[int], max_tokens: int = 16, *, stop: Sequence[int] = (), **fields: Any) -> Request:
        """Queue a request; ``fields`` are those of ``EngineCore.add``."""
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop))
        request = self.core.add(tokens, params, **fields)
        self.outputs[request.id] = []
        return request

    def plan(self) -> Plan:
        """Make the next plan. In overlap mode a second one may be made before the first is committed."""
        plan = self._last = self.core.plan()
        self._plans.append(plan)
        return plan

    @property
    def rows(self) -> dict[str, int]:
        """Request id -> tokens that the last plan computes of it."""
        plan = self._last
        return {} if plan is None else {r.id: count for r, count in zip(plan.requests, plan.counts, strict=True)}

    def commit(self, tokens: Mapping[str, int | Sequence[int]] | None = None) -> list[Delta]:
        """Compute the oldest plan and apply it; returns what is new.

        Args:
            tokens: request id -> the token it yields (or several, where drafts are accepted). Others yield the number
                of tokens known so far.
        """
        plan = self._plans.popleft()
        self._first.clear()
        self._chosen = {name: (v,) if isinstance(v, int) else v for name, v in (tokens or {}).items()}
        outcome = self.executor.execute(plan) if plan else Outcome(plan, ())
        self.core.commit(outcome)
        return self._news()

    def fail(self, why: str = "by hand") -> list[Delta]:
        """The oldest plan was not computed, and none after it will be; returns what is new."""
        plan = self._plans.popleft()
        self._plans.clear()
        self.core.fail_step(plan, why)
        return self._news()

    def step(self, tokens: Mapping[str, int | Sequence[int]] | None = None) -> list[Delta]:
        """``plan`` and ``commit``."""
        self.plan()
        return self.commit(tokens)

    def run(self, limit: int = 1000) -> dict[str, list[int]]:
        """Steps until there is no work; returns ``outputs``. Raises ``AssertionError`` after ``limit`` steps."""
        while self._plans:
            self.commit()
        for _ in range(limit):
            if not self.core.has_work:
                return self.outputs
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {list(self.core.requests.values())[:4]}")

    def why(self, request_id: str) -> Why | None:
        """Why a request got nothing in the last step, or less than it owed."""
        answer = self.core.why(request_id)
        return None if answer is None else answer[0]

    def _news(self) -> list[Delta]:
        deltas = self.core.take_deltas()
        for delta in deltas:
            self.outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.ended[delta.request_id] = delta.finish
        if self.executor.mismatch is not None:
            raise AssertionError(self.executor.mismatch)
        return deltas

    def _next(self, request: Request) -> int:
        tokens = self._chosen.get(request.id, ())
        at = request.num_output - self._first.setdefault(request.id, request.num_output)
        return tokens[at] if at < len(tokens) else request.num_tokens % self.executor.info.vocab_size
