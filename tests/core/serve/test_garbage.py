"""When a process that serves collects garbage."""

from __future__ import annotations

import gc

from engine.core.serve.garbage import AT_LATEST, EVERY, SELDOM, Sweep, seldom


def test_full_collections_come_when_little_is_in_memory_or_at_last() -> None:
    now, swept = 0.0, list[float]()
    sweep = Sweep(lambda: now, lambda: swept.append(now))
    for step in range(1200):
        now = float(step)
        sweep.look(busy=300 <= now < 1190)
    assert (EVERY, AT_LATEST) == (30, 600)
    assert swept == [*range(30, 300, 30), 870, 1190]


def test_thresholds_are_as_they_were_afterwards() -> None:
    before = gc.get_threshold()
    with seldom():
        assert gc.get_threshold() == SELDOM
    assert gc.get_threshold() == before
