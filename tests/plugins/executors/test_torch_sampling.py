"""Sampling: right frequencies, the sets that transformers leaves, numbers of seed and position alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.core.grammar import unpacked
from engine.core.request import Request, SamplingParams
from engine.plugins.executors._sampling import NAN, NONE_LEFT, Draw, sample
from engine.plugins.executors._sampling_draw import Filter, keep, restrict
from engine.plugins.executors._sampling_edits import Editor, Edits, apply
from engine.plugins.executors._sampling_logprobs import token_logprobs
from engine.plugins.executors._sampling_numbers import mix, uniform
from engine.testing import make_core

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0, 2.5])


def frequencies(draws: int = 6000, logits: torch.Tensor = LOGITS, **params: Any) -> list[float]:
    rows = [Draw(SamplingParams(**params), seed=11, position=position) for position in range(draws)]
    sampled = sample(logits.repeat(draws, 1), rows)
    assert not sampled.bad
    counts = Counter(sampled.tokens)
    return [counts[token] / draws for token in range(len(logits))]


def too_far(logits: torch.Tensor, expected: torch.Tensor, draws: int, **params: Any) -> float:
    """The chi-square statistic of draws against probabilities, in standard deviations above its mean.

    Rare tokens are counted as one. The seed is fixed: the result is always the same.
    """
    rows = [Draw(SamplingParams(**params), seed=7, position=position) for position in range(draws)]
    counts = torch.zeros(len(logits), dtype=torch.double)
    for start in range(0, draws, 250):
        for token in sample(logits.repeat(len(rows[start : start + 250]), 1), rows[start : start + 250]).tokens:
            counts[token] += 1
    wanted = expected.double() * draws
    assert not counts[wanted == 0].any()
    common = wanted >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    due = torch.cat([wanted[common], wanted[~common].sum()[None]])
    due, seen = due[due > 0], seen[due > 0]
    freedom = len(due) - 1
    return float(((seen - due) ** 2 / due).sum() - freedom) / max(1.0, (2 * freedom) ** 0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1).tolist()
    assert frequencies(temperature=temperature) == pytest.approx(expected, abs=0.025)


def test_top_k_keeps_the_likeliest_and_their_proportions() -> None:
    kept = torch.tensor([-torch.inf, 3.0, 2.0, -torch.inf, -torch.inf, 2.5]).softmax(-1).tolist()
    assert frequencies(top_k=3) == pytest.approx(kept, abs=0.025)


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    kept = torch.where(LOGITS.softmax(-1) >= 0.3 * LOGITS.softmax(-1).max(), LOGITS, -torch.inf).softmax(-1).tolist()
    assert frequencies(min_p=0.3) == pytest.approx(kept, abs=0.025)
    assert frequencies(min_p=1.0)[1] == 1.0


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = LOGITS.softmax(-1)
    two, three = (float(probabilities.topk(count).values.sum()) for count in (2, 3))
    for top_p, tokens in ((1e-9, {1}), (two - 1e-4, {1, 5}), (two + 1e-4, {1, 5, 2}), (three - 1e-4, {1, 5, 2})):
        assert {token for token, part in enumerate(frequencies(top_p=top_p)) if part} == tokens


def test_top_p_acts_on_what_top_k_left() -> None:
    """Of the two likeliest, the first has 62%: enough for top_p 0.6, although it has less of the whole."""
    assert frequencies(top_k=2, top_p=0.6)[1] == 1.0


def test_a_vocabulary_that_is_no_number_of_whole_blocks() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert too_far(logits, logits.softmax(-1), 10_000) < 4


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 40},
    {"top_k": 700, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
    {"top_p": 0.99, "min_p": 0.02},
    {"repetition_penalty": 1.4, "top_k": 20},
]


@pytest.fixture(scope="module")
def real_logits(tiny: Callable[..., Path]) -> torch.Tensor:
    """The next token's logits after some prompt, of a model with random weights and a large vocabulary."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny("llama", vocab_size=2000), dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1].clone()


PROMPT = [5, 9, 2, 700, 1234, 9, 31, 1999, 8]


def transformers_says(logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int]) -> torch.Tensor:
    """Probabilities after transformers' own processors, in its own order."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([list(tokens)]), logits[None].clone())[0].softmax(-1)


@pytest.mark.parametrize("wish", FILTERS, ids=str)
def test_the_distribution_is_that_of_transformers(real_logits: torch.Tensor, wish: dict[str, Any]) -> None:
    """The same tokens are possible, and they come as often as they should (chi-square, fixed seed)."""
    params = SamplingParams(**wish)
    expected = transformers_says(real_logits, params, PROMPT)
    logits = real_logits.clone()
    request = Request(id="r", tokens=list(PROMPT), num_prompt=len(PROMPT), params=params, max_total=99)
    apply(logits[None], [Editor().edits(request, len(PROMPT), len(PROMPT), ())], [params])
    assert too_far(logits, expected, 3000, **{**wish, "repetition_penalty": 1.0}) < 4
    if params.top_k or params.top_p < 1:
        vocab = len(logits)
        columns = (params.top_k or vocab, params.top_p, np.log(params.min_p) if params.min_p else -torch.inf)
        wanted = Filter(*[torch.tensor([value]) for value in columns])
        ids, _, inside = keep(logits[None] / params.temperature, wanted, vocab)
        assert sorted(ids[inside].tolist()) == expected.nonzero().flatten().tolist()


@pytest.mark.parametrize("width", [1, 8, 64, 500])
def test_sets_larger_than_the_first_look_are_known_as_such(width: int) -> None:
    """Peaked and flat rows together, against the definition computed row by row."""
    logits = torch.randn(12, 500, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 8, 12)[:, None]
    top_k = torch.tensor([500, 3, 500, 20, 500, 100] * 2)
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.7, 0.99, 0.95] * 2)
    ids, mass, inside = keep(logits, Filter(top_k, top_p, torch.full((12,), -torch.inf)), width)
    for number, (row, limit, most) in enumerate(zip(logits, top_k.tolist(), top_p.tolist(), strict=True)):
        order = row.argsort(descending=True)[:limit]
        before = row[order].double().softmax(-1).cumsum(-1).roll(1)
        before[0] = 0
        wanted = sorted(order[before < most].tolist())
        if mass[number, 0].isnan():
            assert width < limit  # what it could not know it says
        else:
            assert sorted(ids[number][inside[number]].tolist()) == wanted


@pytest.mark.parametrize("top_k", [700, 900])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_large_sets_are_the_same_without_sorting(top_k: int, top_p: float) -> None:
    logits = torch.randn(8, 900, generator=torch.Generator().manual_seed(4)) * torch.linspace(0.1, 8, 8)[:, None]
    logits[:, 7] = -torch.inf
    wish = Filter(torch.full((8,), top_k), torch.full((8,), top_p), torch.full((8,), -torch.inf))
    ids, _, inside = keep(logits, wish, 900)
    left = restrict(logits, wish)
    for row in range(8):
        assert (left[row] > -torch.inf).nonzero().flatten().tolist() == sorted(ids[row][inside[row]].tolist())
        assert torch.equal(left[row][ids[row][inside[row]]], logits[row][ids[row][inside[row]]])


def test_limits_beyond_the_vocabulary_change_nothing() -> None:
    assert frequencies(top_k=1000) == frequencies(top_k=0, top_p=1.0) == frequencies()


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 30, 200, 2000]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "min_tokens": st.sampled_from([0, 5]),
    },
)


@settings(max_examples=40, deadline=None)
@given(wishes=st.lists(PARAMS, min_size=1, max_size=12), seed=st.integers(0, 2**32))
def test_a_row_yields_the_same_alone_and_in_any_company(wishes: list[dict[str, Any]], seed: int) -> None:
    logits = 3 * torch.randn(len(wishes), 1500, generator=torch.Generator().manual_seed(seed))
    editor = Editor()
    draws = []
    for number, wish in enumerate(wishes):
        params = SamplingParams(**wish)
        tokens = [number, 3, 3, 7]
        request = Request(id="r", tokens=tokens, num_prompt=2, params=params, max_total=9, stop_ids=frozenset({1}))
        draws.append(Draw(params, seed, number, editor.edits(request, 4, 4, ())))
    together = sample(logits.clone(), draws)
    for number, each in enumerate(draws):
        alone = sample(logits[number : number + 1].clone(), [each])
        assert alone.tokens == [together.tokens[number]]
        assert alone.logprobs.get(0) == together.logprobs.get(number)


def test_rows_that_ask_for_nothing_are_not_touched() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    wish = SamplingParams(temperature=0, frequency_penalty=1, logit_bias={4: 50.0}, logprobs=2)
    request = Request(id="r", tokens=[1, 2], num_prompt=1, params=wish, max_total=9)
    plain = Draw(SamplingParams(temperature=0))
    sampled = sample(logits, [plain, Draw(wish, edits=Editor().edits(request, 2, 2, ())), plain])
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    assert sampled.tokens == [int(before[0].argmax()), 4, int(before[2].argmax())]
    assert list(sampled.logprobs) == [1]


def test_rows_with_nan_are_named_and_the_others_stand() -> None:
    logits = LOGITS.repeat(4, 1)
    logits[1, 4] = float("nan")
    logits[3] = -torch.inf
    for temperature in (0.0, 1e-9):
        sampled = sample(logits.clone(), [Draw(SamplingParams(temperature=temperature, logprobs=1))] * 4)
        assert sampled.bad == {1: NAN, 3: NONE_LEFT}
        assert sampled.tokens[0] == sampled.tokens[2] == 1
        assert list(sampled.logprobs) == [0, 2]


def test_stop_tokens_are_not_drawn_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias={1: 100.0})
    request = Request(id="r", tokens=[7, 7], num_prompt=2, params=params, max_total=9, stop_ids=frozenset({1, 5}))
    editor = Editor()
    chosen = [sample(LOGITS[None].clone(), [Draw(params, 0, at, editor.edits(request, at, 2, ()))]) for at in (2, 3, 4)]
    assert [sampled.tokens for sampled in chosen] == [[2], [2], [1]]


# ---- penalties


def penalised(tokens: Sequence[int], prompt: int, params: SamplingParams, vocab: int = 12) -> torch.Tensor:
    """Logits by the definition: OpenAI's for frequency and presence, after the repetition penalty (CTRL's)."""
    logits = torch.linspace(-2, 3, vocab)
    for token in set(tokens):
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(tokens[prompt:]).items():
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    return logits


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 11), min_size=1, max_size=30),
    cuts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=8),
    prompt=st.integers(1, 30),
)
def test_penalties_follow_from_the_tokens_alone(tokens: list[int], cuts: list[tuple[int, int]], prompt: int) -> None:
    """Whatever was asked before: with tokens in flight, further ahead, or back at an earlier position."""
    prompt = min(prompt, len(tokens))
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7)
    request = Request(id="r", tokens=list(tokens), num_prompt=prompt, params=params, max_total=99)
    editor = Editor()
    for upto, ahead in [*cuts, (len(tokens), 0)]:
        committed = max(prompt, min(upto, len(tokens)))
        pending = [*tokens[committed:], 3, 11, 3][:ahead]
        logits = torch.linspace(-2, 3, 12)[None].clone()
        apply(logits, [editor.edits(request, committed + len(pending), committed, pending)], [params])
        torch.testing.assert_close(logits[0], penalised([*tokens[:committed], *pending], prompt, params))


def test_counts_of_requests_that_ended_are_dropped() -> None:
    params = SamplingParams(presence_penalty=1)
    editor = Editor()
    for number in range(100):
        request = Request(id=f"r{number}", tokens=[1, 2], num_prompt=1, params=params, max_total=9)
        editor.edits(request, 2, 2, ())
        request.state = type(request.state).FINISHED
    assert len(editor._known) <= 1


# ---- log-probabilities


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(70, 200, generator=torch.Generator().manual_seed(5))  # more rows than are looked at together
    raw = logits.log_softmax(-1)
    wish = SamplingParams(temperature=0.3, top_k=3, frequency_penalty=1.0, logit_bias={7: 3.0}, logprobs=4)
    sampled = sample(logits.clone(), [Draw(wish, seed=1, position=row) for row in range(70)])
    assert set(sampled.logprobs) == set(range(70))
    for row, found in sampled.logprobs.items():
        assert found.token == sampled.tokens[row]
        assert found.logprob == pytest.approx(float(raw[row, found.token]), abs=1e-5)
        assert found.rank == 1 + int((raw[row] > raw[row, found.token]).sum())
        best = raw[row].topk(4)
        assert found.top == tuple(best.indices.tolist())
        assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_rivals_as_it_asked_for() -> None:
    found = token_logprobs(LOGITS.repeat(3, 1), [0, 1, 2], [0, 2, 9])
    assert [len(one.top) for one in found] == [0, 2, 6]
    assert [one.rank for one in found] == [4, 1, 3]


# ---- numbers


def test_numbers_are_uniform_and_belong_to_seed_choice_and_position() -> None:
    numbers = [uniform(1, 0, position) for position in range(20_000)]
    assert all(0 <= number < 1 for number in numbers)
    counts = Counter(int(10 * number) for number in numbers)
    assert all(abs(count - 2000) < 200 for count in counts.values())
    assert numbers == [uniform(1, 0, position) for position in range(20_000)]
    for other in ([uniform(2, 0, n) for n in range(20_000)], [uniform(1, 1, n) for n in range(20_000)]):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_mixing_keeps_numbers_apart() -> None:
    assert len({mix(1, 23), mix(12, 3), mix(123), mix(-1, 23), mix(1, -23)}) == 5


def test_choices_of_neighbouring_seeds_are_different() -> None:
    """Choice 1 of seed 7 is not choice 0 of seed 8."""
    drawn = {
        (seed, choice): sample(torch.zeros(1, 10**5), [Draw(SamplingParams(choice=choice), seed=seed)]).tokens[0]
        for seed in range(5)
        for choice in range(5)
    }
    assert len(set(drawn.values())) == 25


# ---- whole requests, on a model

WISHES: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 42},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 42, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 1.0, "seed": 42, "choice": 1, "min_p": 0.02, "logit_bias": {9: 2.0}, "min_tokens": 4},
    {"temperature": 0.0},
]


def answers(executor: Any, wishes: Sequence[dict[str, Any]], **settings: Any) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of one request for each wish, all together; preempted at random if asked to."""
    rng = random.Random(settings.pop("preempt", None))
    preempting = rng.random() if "chance" not in settings else settings.pop("chance")
    core = make_core(executor=executor, num_pages=128, max_model_len=100, **settings)
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **wish) for wish in wishes]
    requests = [core.add([5, 6, 7, 8, 5, 9, *range(20, 30)], wish) for wish in params]
    found: dict[str, tuple[list[Any], list[Any]]] = {request.id: ([], []) for request in requests}
    while core.has_work:
        deltas = core.step()
        if rng.random() < preempting and core.running:
            deltas += core.drain()
            for victim in core.running[:1]:
                core.give_up(victim, front=True)
        for delta in deltas:
            found[delta.request_id][0].extend(delta.logprobs)
            found[delta.request_id][1].extend(delta.prompt_logprobs)
    return [(request.output, *found[request.id]) for request in requests]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_request_is_the_same_in_any_batch_any_chunks_after_preemptions_and_in_both_loops(
    tiny: Callable[..., Path], make_executor: Any, overlap: bool, budget: int
) -> None:
    path = tiny("llama")
    alone = [answers(make_executor(path, seed=n), [wish], chance=0)[0] for n, wish in enumerate(WISHES)]
    for seed in range(3):
        settings = {"overlap": overlap, "max_batch_tokens": budget, "max_running": 6, "preempt": seed, "chance": 0.3}
        together = answers(make_executor(path, seed=9), WISHES, **settings)
        for (tokens, logprobs, of_prompt), (others, their_logprobs, of_their_prompt) in zip(
            alone, together, strict=True
        ):
            assert tokens == others
            close(logprobs, their_logprobs)
            close(of_prompt, of_their_prompt)
    assert len({tuple(tokens) for tokens, _, _ in alone}) == len(WISHES)


def close(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert [one.token for one in ours] == [one.token for one in theirs]
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)


def test_unseeded_requests_differ_and_follow_the_engine_seed(tiny: Callable[..., Path], make_executor: Any) -> None:
    def outputs(seed: int) -> list[list[int]]:
        found = answers(make_executor(tiny("llama"), seed=seed), [{"temperature": 1.0}] * 2, chance=0)
        return [tokens for tokens, _, _ in found]

    first = outputs(0)
    assert first[0] != first[1]
    assert outputs(0) == first
    assert outputs(1) != first


def test_prompt_logprobs_are_those_of_the_model(tiny: Callable[..., Path], make_executor: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny("llama")
    [(output, of_tokens, of_prompt)] = answers(make_executor(path), [WISHES[1]], chance=0, max_batch_tokens=7)
    prompt = [5, 6, 7, 8, 5, 9, *range(20, 30)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        raw = model(torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)
    for at, one in enumerate([*of_prompt, *of_tokens], 1):
        token = [*prompt, *output][at]
        assert one.token == token
        assert one.logprob == pytest.approx(float(raw[at - 1, token]), abs=1e-4)
        assert one.top[0] == int(raw[at - 1].argmax())
    assert len(of_prompt) == len(prompt) - 1


# ---- grammars


def mask_of(allowed: Sequence[int], vocab: int) -> Any:
    bits = np.zeros(32 * -(-vocab // 32), bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_only_what_a_mask_allows_is_drawn_and_other_rows_do_not_notice(seed: int) -> None:
    rng = random.Random(seed)
    vocab = rng.choice([6, 31, 33, 400])
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(seed % 2**31))
    ways: Any = [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}, {"min_p": 0.3}]
    params = [SamplingParams(**way, logprobs=1, logit_bias={0: 100.0}, repetition_penalty=1.5) for way in ways]
    masks = [
        mask_of(rng.sample(range(vocab), rng.randint(1, 4)), vocab) if rng.random() < 0.6 else None for _ in params
    ]
    rows = [
        Draw(wish, seed=seed, position=row, edits=Edits((np.array([0]), np.array([100.0], np.float32)), (), None, mask))
        for row, (wish, mask) in enumerate(zip(params, masks, strict=True))
    ]
    sampled = sample(logits.clone(), rows)
    assert not sampled.bad
    plain = sample(logits.clone(), [row._replace(edits=row.edits._replace(mask=None)) for row in rows])
    for row, mask in enumerate(masks):
        if mask is None:
            assert sampled.tokens[row] == plain.tokens[row]
        else:
            assert unpacked(mask, vocab)[sampled.tokens[row]]
        own = logits[row].log_softmax(-1)[sampled.tokens[row]].item()
        assert sampled.logprobs[row].logprob == pytest.approx(own, abs=1e-5)  # of the model, whatever is masked


def test_a_mask_that_leaves_nothing_ends_its_row_alone() -> None:
    rows = [Draw(SamplingParams(), edits=Edits(mask=mask_of([], 6))), Draw(SamplingParams(temperature=0))]
    sampled = sample(LOGITS.repeat(2, 1), rows)
    assert sampled.bad == {0: NONE_LEFT}
    assert sampled.tokens[1] == 1
