"""Sessions of the radix cache: a conversation's prefix outlives what belongs to none, and never keeps anybody out."""

from __future__ import annotations

import random

import pytest

from engine.core import SamplingParams
from engine.testing import ShadowExecutor, make_core


def core_with(slots: int = 2, ttl: float = 60.0, pages: int = 16, now: list[float] | None = None):
    core = make_core(
        kvcache="radix",
        scheduler="radix",
        executor=ShadowExecutor(),
        num_pages=pages,
        page_size=4,
        kvcache_options={"session_slots": slots, "session_ttl": ttl},
    )
    if now is not None:
        core.kv.sessions._clock = lambda: now[0]
    return core


def run(core, tokens, session=None) -> int:
    """Runs a request to its end; the tokens that the cache gave it."""
    metadata = {"session": session} if session is not None else None
    request = core.add(tokens, SamplingParams(max_tokens=2), metadata=metadata)
    while core.has_work:
        core.step()
        core.check()
    return request.cached_tokens


def crowd(core, number: int = 6) -> None:
    """Other prompts that together need more than the pool."""
    for other in range(number):
        run(core, [100 + other * 20 + at for at in range(16)])


TALK = list(range(12))


def test_a_conversation_outlives_the_crowd():
    core = core_with()
    run(core, TALK, "anna")
    crowd(core)
    assert run(core, [*TALK, 90, 91], "anna") == 12


def test_without_a_session_the_crowd_evicts_it():
    core = core_with()
    run(core, TALK)
    crowd(core)
    assert run(core, [*TALK, 90, 91]) == 0


def test_the_oldest_is_let_go_above_the_limit():
    core = core_with(slots=1)
    run(core, TALK, "anna")
    run(core, [50 + at for at in range(8)], "berta")
    assert len(core.kv.sessions) == 1
    crowd(core)
    assert run(core, [*TALK, 90], "anna") == 0


def test_silence_ends_a_conversation():
    now = [0.0]
    core = core_with(ttl=10.0, now=now)
    run(core, TALK, "anna")
    now[0] = 11.0
    crowd(core)
    assert len(core.kv.sessions) == 0
    assert run(core, [*TALK, 90], "anna") == 0


def test_a_conversation_never_keeps_anybody_out():
    core = core_with(slots=8)
    run(core, list(range(40)), "anna")
    assert core.kv.numbers().available == 16
    assert run(core, [200 + at for at in range(56)]) == 0  # needs nearly the whole pool


def test_reset_forgets_all_and_later_turns_still_work():
    core = core_with()
    run(core, TALK, "anna")
    core.kv.reset()
    assert core.kv.numbers().evictable == 0
    assert run(core, TALK, "anna") == 0
    assert run(core, [*TALK, 5], "anna") == 12


@pytest.mark.parametrize("seed", range(4))
def test_marks_stay_true_over_a_random_history(seed):
    rng = random.Random(seed)
    core = core_with(slots=3, pages=24)
    for _ in range(150):
        family = rng.randrange(5)
        tokens = [family * 30 + at for at in range(rng.choice([4, 8, 12, 20]))] + [rng.randrange(400, 420)]
        run(core, tokens, rng.choice([None, "a", "b", "c", "d", "e"]))
        if rng.random() < 0.1:
            keys = [candidate.key for candidate in core.kv.candidates()]
            core.kv.drop(keys[: rng.randrange(len(keys) + 1)])
        marks: dict = {}
        for node, _ in core.kv.sessions._last.values():
            while node.parent is not None:
                marks[node] = marks.get(node, 0) + 1
                node = node.parent
        assert all(node.warm == marks.get(node, 0) for node in core.kv.tree.nodes())
    for session in list(core.kv.sessions._last):
        core.kv.sessions.forget(session)
    assert not any(node.warm for node in core.kv.tree.nodes())
    assert core.executor.mismatch is None
