"""Every rule of a policy, and the one thing that this one promises."""

from __future__ import annotations

from engine.testing import Harness, PolicySuite


class TestEveryRule(PolicySuite):
    plugin = "shortest-first"


def test_the_shortest_prompt_starts_first() -> None:
    harness = Harness(policies=["shortest-first"], max_running=1)
    for name, length in (("long", 9), ("short", 1), ("middle", 4), ("short too", 1)):
        harness.add([1] * length, max_tokens=1, request_id=name)
    harness.run()
    assert list(harness.ended) == ["short", "short too", "middle", "long"]
