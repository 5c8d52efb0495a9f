"""Who gets a request."""

from __future__ import annotations

import pytest

from engine.core import ConfigError
from engine.lab.routers import ROUTERS, PrefixAware, router

LONG = list(range(640))


def test_round_robin_takes_turns():
    one = router("round-robin", 3)
    assert [one.choose(LONG) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_open_goes_by_requests():
    one = router("least-open", 3)
    assert [one.choose(LONG) for _ in range(4)] == [0, 1, 2, 0], "equals take turns"
    for engine in (0, 0, 1):
        one.sent(engine, 1)
    assert one.choose(LONG) == 2
    one.sent(2, 10_000)
    one.sent(2, 1)
    assert one.choose(LONG) == 1
    one.ended(0, 1)
    one.ended(0, 1)
    assert one.choose(LONG) == 0


def test_least_tokens_goes_by_what_is_owed():
    one = router("least-tokens", 2)
    one.sent(0, 100)
    one.sent(1, 500)
    assert one.choose(LONG) == 0
    one.answered(1, 450)
    assert one.choose(LONG) == 1
    one.ended(1, 50)
    one.ended(0, 100)
    assert (one.tokens, one.open) == ([0, 0], [0, 0])


def test_prefix_goes_where_the_beginning_went():
    one = router("prefix", 4)
    first = one.choose(LONG)
    one.sent(first, 700)
    assert one.choose([*LONG, 1, 2, 3]) == first
    assert one.choose([*LONG[:320], *range(900, 1200)]) == first
    assert one.choose(list(range(5000, 5640))) != first, "nothing in common: the least busy"
    assert one.choose([*LONG[:64], *range(7000, 8000)]) != first, "too little in common"


def test_prefix_leaves_who_is_far_busier():
    one = router("prefix", 2)
    first = one.choose(LONG)
    for _ in range(PrefixAware.BALANCE_ABS):
        one.sent(first, 1)
    assert one.choose(LONG) == first
    one.sent(first, 1)
    assert one.choose(LONG) == 1 - first


def test_prefix_forgets_what_is_old(monkeypatch):
    monkeypatch.setattr(PrefixAware, "BLOCKS", 20)
    one = PrefixAware(2)
    first = one.choose(LONG)
    one.sent(first, 700)
    for number in range(4):
        one.tokens = [10_000, 10_000]
        one.tokens[first] = 0
        one.choose([50_000 + number * 1000 + n for n in range(640)])
    assert all(len(seen) <= 20 for seen in one._seen)
    assert set(one._engines_of) == {block for seen in one._seen for block in seen}
    one.tokens = [1, 1]
    one.tokens[1 - first] = 0
    assert one.choose(LONG) == 1 - first, "nothing is known of it any more"


def test_a_router_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match="there are round-robin"):
        router("random", 2)
    assert all(ROUTERS[name].__doc__ for name in ROUTERS)
