"""What every scheduler must do: bring every request to its end, with any cache, in both loops, within the limits."""

from __future__ import annotations

import itertools
from typing import ClassVar

from engine.core.plan import Plan
from engine.core.protocols import Plugin
from engine.core.request import SamplingParams
from engine.testing.executors import ScriptedModel
from engine.testing.guard import Violation
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.suites.policy import decide_the_same
from engine.testing.workload import Situation, closing


class SchedulerSuite(Suite):
    """Rules of a scheduler.

    Class attributes:
        bounded_wait: steps within which a request ends though new ones keep coming; ``None`` where the scheduler
            promises nothing of the kind (its order starves by design).
    """

    role = "scheduler"
    bounded_wait: ClassVar[int | None] = 400

    @classmethod
    def situations(cls) -> list[Situation]:
        """Both caches, page sizes and loops, plain and with everything going wrong."""
        return [
            Situation("-", kvcache, page, overlap, drafts=bool(rough), faults=bool(rough), flaky=bool(rough))
            for kvcache, page, overlap, rough in itertools.product(("paged", "radix"), (1, 4), (False, True), (0, 1))
        ]

    def try_once(self, plugin: Plugin) -> None:
        """One request, alone."""
        core = make_core(**{"scheduler": plugin, **self.limits})
        with closing(core):
            core.add([1, 2, 3], SamplingParams(max_tokens=2))
            core.step()

    def test_every_request_ends(self, situation: Situation) -> None:
        """Every request ends by itself and says what the model says; no token without a page, no budget exceeded, no
        page lost, whatever fails and whichever cache is below."""
        self.workload(situation).run()

    def test_nothing_is_planned_for_nobody(self) -> None:
        """With nothing to do the plan is empty, and the first request after that is served at once."""
        core = make_core(**{"scheduler": self.make(), **self.limits})
        with closing(core):
            plan: Plan = core.plan()
            if plan:
                raise Violation(f"nobody is there, and a step of {plan.total_tokens} tokens is planned")
            core.commit(core.executor.execute(plan))
            core.add([1, 2, 3], SamplingParams(max_tokens=1), request_id="first")
            news = [delta for _ in range(3) for delta in core.step()]
            if not any(delta.tokens for delta in news):
                raise Violation(f"a request alone got no token in 3 steps: {core.why('first')}")

    def test_nobody_starves(self) -> None:
        """A request ends within ``bounded_wait`` steps although new ones keep coming."""
        if self.bounded_wait is None:
            return
        for target in ("short", "long"):
            self._starve(target, self.bounded_wait)

    def _starve(self, target: str, bound: int) -> None:
        """More requests come than can be served; the one that came among the first must end."""
        core = make_core(**{"scheduler": self.make(), "max_waiting": 10_000, **self.limits})
        with closing(core):
            for number in range(bound):
                if number == 5:
                    prompt = [7] * (5 if target == "short" else 60)
                    request = core.add(prompt, SamplingParams(max_tokens=20), request_id="old", priority=5)
                for twin in range(2):
                    core.add([number % 50, twin, 3], SamplingParams(max_tokens=6), priority=5)
                core.step()
                if number > 5 and request.finished:
                    if request.finish != "length":
                        raise Violation(f"a {target} request ended with {request.finish}: {request.detail}")
                    return
            raise Violation(f"a {target} request has not ended after {bound} steps while others come: {request!r}")

    def test_it_decides_the_same_again(self) -> None:
        """The same workload is decided the same: recordings replay, and a failure can be found again."""
        situation = self.situations()[1]
        runs = [self.workload(situation) for _ in range(2)]
        for workload in runs:
            workload.run()
        decide_the_same(runs[0].decisions, runs[1].decisions)

    def test_a_failing_step_ends_its_own_requests_only(self) -> None:
        """A step that fails ends the requests of its plan, and the others are served."""
        executor = ScriptedModel()
        core = make_core(**{"scheduler": self.make(), **self.limits}, executor=executor)
        with closing(core):
            first = core.add([1, 2, 3], SamplingParams(max_tokens=3))
            executor.fail_next = 1
            core.step()
            later = core.add([1, 2, 3], SamplingParams(max_tokens=3))
            for _ in range(20):
                core.step()
            if first.finish != "error" or later.finish != "length":
                raise Violation(
                    f"the failed step's request ended by {first.finish}, the one after it by {later.finish}"
                )
