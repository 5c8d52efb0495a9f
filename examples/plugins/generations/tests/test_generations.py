"""Every rule of a KV cache, and what this one promises beyond them."""

from __future__ import annotations

from typing import ClassVar

import pytest

from engine.core import SamplingParams
from engine.testing import KVCacheSuite, make_core

SYSTEM = list(range(40))  # ten pages of four


class TestEveryRule(KVCacheSuite):
    plugin = "generations"


class TestEveryRuleWherePagesAreDemoted(KVCacheSuite):
    plugin = "generations"
    options: ClassVar = {"protected": 0.1}


def found_after_a_flood(kvcache: str, flood: int, *, warm: int = 2, **options: float) -> int:
    """How much of a system prompt is cached after so many other prompts, each of them seen once."""
    core = make_core(kvcache=kvcache, kvcache_options=options, num_pages=32, page_size=4, max_running=1)

    def ask(*prompts: list[int]) -> int:
        requests = [core.add(prompt, SamplingParams(max_tokens=1)) for prompt in prompts]
        while core.has_work:
            core.step()
            core.check()
        return requests[-1].cached_tokens

    for number in range(warm):
        ask([*SYSTEM, 900 + number])
    ask(*([500 + number] * 41 for number in range(flood)))
    return ask([*SYSTEM, 999])


def test_a_flood_does_not_wash_out_what_was_found_again() -> None:
    assert found_after_a_flood("paged", flood=5) == 0
    assert found_after_a_flood("generations", flood=30) == len(SYSTEM)


def test_what_nobody_found_again_is_not_protected() -> None:
    assert found_after_a_flood("generations", flood=5, warm=1) == 0


def test_beyond_its_share_what_is_protected_becomes_ordinary() -> None:
    assert found_after_a_flood("generations", flood=5, protected=0.0) == 0


@pytest.mark.parametrize("later", [False, True])
def test_reset_forgets_also_what_is_in_use(later: bool) -> None:
    core = make_core(kvcache="generations", num_pages=32, page_size=4)
    core.add(SYSTEM, SamplingParams(max_tokens=6))
    core.step()
    core.kv.reset()
    core.check()
    if later:  # the other joins while the first still runs
        other = core.add(SYSTEM, SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
        core.check()
    if not later:
        assert core.kv.numbers().free == 32
        other = core.add(SYSTEM, SamplingParams(max_tokens=1))
        while core.has_work:
            core.step()
    assert other.cached_tokens == 0
