"""Sampling: right frequencies, and numbers that depend on seed and position alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.request import Request, SamplingParams
from engine.plugins.executors._sampling import Draw, _filter, draw_for, gumbel, mix, sample

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0, 2.5])


def frequencies(draws: int = 6000, **params: Any) -> list[float]:
    rows = [Draw(SamplingParams(**params), seed=11, position=position) for position in range(draws)]
    tokens, bad = sample(LOGITS.repeat(draws, 1), rows)
    assert not bad
    counts = Counter(tokens)
    return [counts[token] / draws for token in range(len(LOGITS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1).tolist()
    assert frequencies(temperature=temperature) == pytest.approx(expected, abs=0.025)


def test_top_k_keeps_the_likeliest_and_their_proportions() -> None:
    kept = torch.tensor([-torch.inf, 3.0, 2.0, -torch.inf, -torch.inf, 2.5]).softmax(-1).tolist()
    assert frequencies(top_k=3) == pytest.approx(kept, abs=0.025)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = LOGITS.softmax(-1)
    two, three = (float(probabilities.topk(count).values.sum()) for count in (2, 3))
    for top_p, tokens in ((1e-9, {1}), (two - 1e-4, {1, 5}), (two + 1e-4, {1, 5, 2}), (three - 1e-4, {1, 5, 2})):
        assert {token for token, part in enumerate(frequencies(top_p=top_p)) if part} == tokens


def test_top_p_acts_on_what_top_k_left() -> None:
    """Of the two likeliest, the first has 62%: enough for top_p 0.6, although it has less of the whole."""
    assert frequencies(top_k=2, top_p=0.6)[1] == 1.0


@pytest.mark.parametrize("few", [1, 8, 64, 500])
def test_sets_larger_than_the_first_look_are_found_too(few: int) -> None:
    """Peaked and flat rows together, against the definition computed row by row."""
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 8, 12)[:, None]
    top_k = torch.tensor([500, 3, 500, 20, 500, 100] * 2)
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.7, 0.99, 0.95] * 2)
    kept = _filter(logits, top_k, top_p, few) > -torch.inf
    for row, limit, mass, mine in zip(logits, top_k.tolist(), top_p.tolist(), kept, strict=True):
        order = row.argsort(descending=True)[:limit]
        before = row[order].double().softmax(-1).cumsum(-1).roll(1)
        before[0] = 0
        assert mine.nonzero().flatten().tolist() == sorted(order[before < mass].tolist())


def test_limits_beyond_the_vocabulary_change_nothing() -> None:
    assert frequencies(top_k=1000) == frequencies(top_k=0, top_p=1.0) == frequencies()


def test_greedy_rows_and_drawn_rows_share_a_batch() -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    rows = [Draw(greedy if number % 2 else drawn, 3, number) for number in range(200)]
    tokens, _ = sample(LOGITS.repeat(200, 1), rows)
    assert set(tokens[1::2]) == {1}
    assert len(set(tokens[::2])) > 3
    alone = [sample(LOGITS[None].clone(), [row])[0][0] for row in rows]
    assert tokens == alone


def test_rows_with_nan_are_named_and_the_others_stand() -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = float("nan")
    for temperature in (0.0, 1e-9):
        tokens, bad = sample(logits.clone(), [Draw(SamplingParams(temperature=temperature), 0, 0)] * 3)
        assert bad == [1]
        assert tokens[0] == tokens[2] == 1


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    request = Request(id="r", tokens=[7, 7], num_prompt=2, params=params, max_total=9, stop_ids=frozenset({1, 5}))
    chosen = [sample(LOGITS[None].clone(), [draw_for(request, position, 0)])[0] for position in (2, 3, 4)]
    assert chosen == [[2], [2], [1]]


def test_noise_is_gumbel_and_belongs_to_seed_and_position() -> None:
    noise = torch.from_numpy(gumbel(1, 2, 50_000))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(1.645, abs=0.05)
    assert torch.equal(noise, torch.from_numpy(gumbel(1, 2, 50_000)))
    for other in (gumbel(2, 2, 50_000), gumbel(1, 3, 50_000), gumbel(-1, 2, 50_000)):
        assert abs(float(torch.corrcoef(torch.stack([noise, torch.from_numpy(other)]))[0, 1])) < 0.02


def test_mixing_keeps_numbers_apart() -> None:
    assert len({mix(1, 23), mix(12, 3), mix(123), mix(-1, 23), mix(1, -23)}) == 5


def test_a_seeded_request_is_the_same_in_any_batch(tiny: Callable[..., Path], make_executor: Any, driver: Any) -> None:
    path = tiny("llama")
    wanted = {"temperature": 1.0, "seed": 42, "top_p": 0.9, "top_k": 40}
    run = driver(make_executor(path), 64, 4)
    alone = run.finish([run.request([5, 6, 7, 8], **wanted)], 15)[0]
    run = driver(make_executor(path, seed=9), 64, 4)
    others = [run.request([number, 3], temperature=1.5) for number in range(20, 24)]
    mixed = run.finish([*others[:2], run.request([5, 6, 7, 8], **wanted), *others[2:]], 15, chunk=3)[2]
    assert mixed == alone
    assert run.finish([run.request([5, 6, 7, 8], **{**wanted, "seed": 43})], 15)[0] != alone


def test_unseeded_requests_differ_and_follow_the_engine_seed(
    tiny: Callable[..., Path], make_executor: Any, driver: Any
) -> None:
    def outputs(seed: int) -> list[list[int]]:
        run = driver(make_executor(tiny("llama"), seed=seed), 64, 4)
        return run.finish([run.request([5, 6], temperature=1.0) for _ in range(2)], 15)

    first = outputs(0)
    assert first[0] != first[1]
    assert outputs(0) == first
    assert outputs(1) != first
