"""What every policy must do: answer validly, change no text, lose nobody."""

from __future__ import annotations

from typing import Any

from engine.core.protocols import Plugin
from engine.testing.guard import Violation
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.workload import Situation, closing

LONE_STEPS = 100


class PolicySuite(Suite):
    """Rules of a policy. It may reorder, hold back and reject; it may not change what anybody says."""

    role = "policy"

    @classmethod
    def situations(cls) -> list[Situation]:
        """Every scheduler, cache, page size and loop; the odd ones with failures and drafts."""
        return [
            Situation(scheduler, kvcache, page, overlap, drafts=rough, faults=rough, flaky=rough)
            for number, (scheduler, kvcache) in enumerate(
                [("unified", "paged"), ("unified", "radix"), ("radix", "paged"), ("radix", "radix")]
            )
            for page, overlap, rough in [(1, False, number % 2 == 0), (4, True, number % 2 == 1), (4, False, True)]
        ]

    def plugins(self, situation: Situation) -> dict[str, Any]:
        """It stands among the policies."""
        return {"policies": [self.make()]}

    def try_once(self, plugin: Plugin) -> None:
        """One request, alone."""
        core = make_core(**{"policies": [plugin], **self.limits})
        with closing(core):
            core.add([1, 2, 3])
            core.step()

    def test_texts_are_unchanged(self, situation: Situation) -> None:
        """Answers are valid and never counted as faults; requests are read, not changed; every request ends, and
        says what it says without the policy."""
        self.workload(situation).run()

    def test_a_lone_request_is_served(self) -> None:
        """A request that comes to an empty engine is served, not rejected and not held back for ever."""
        self._serve_one(self.make())

    def test_it_decides_the_same_again(self) -> None:
        """The same workload is decided the same: recordings replay, and a failure can be found again."""
        situation = self.situations()[-1]
        runs = [self.workload(situation) for _ in range(2)]
        for workload in runs:
            workload.run()
        decide_the_same(runs[0].decisions, runs[1].decisions)

    def _serve_one(self, policy: Plugin) -> None:
        core = make_core(**{"policies": [policy], **self.limits})
        with closing(core):
            request = core.add([1, 2, 3, 4, 5], metadata={"tenant": "a"}, request_id="alone")
            for _ in range(LONE_STEPS):
                if request.num_output:
                    break
                core.step()
            if not request.num_output:
                raise Violation(
                    f"a request alone got no token in {LONE_STEPS} steps: {request.detail or core.why('alone')}"
                )


def decide_the_same(first: list[Any], second: list[Any]) -> None:
    """Raise ``Violation`` at the first step that differs."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            raise Violation(f"step {number + 1} is {one} the first time and {other} the second")
    if len(first) != len(second):
        raise Violation(f"{len(first)} steps the first time and {len(second)} the second")
