"""New weights in a running engine: its text is that of a fresh one, and no KV of the old ones is ever read again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, AsyncEngine, ConfigError, EngineConfig, EngineError, ModelError, SamplingParams
from engine.core import ModelInfo, Policy, Transfer, exchange
from engine.testing import FaultyConnector, make_core

Folders = dict[str, Path]
Weights = dict[str, dict[str, Any]]

PROMPT = [5, 9, 2, 7, 1, 8, 3, 3, 6, 4, 12, 11]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=40)
SIZE = {"page_size": 4, "num_pages": 128, "audit": True}


def text(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return llm.generate([prompt], params)[0].token_ids


@pytest.fixture(scope="module")
def fresh(tiny: Folders) -> dict[str, tuple[int, ...]]:
    """What engines say that never had other weights."""
    said = {}
    for name, folder in tiny.items():
        with LLM(model=str(folder), **SIZE) as llm:
            said[name] = text(llm, params=LONG)
    assert said["old"][0] != said["new"][0]
    return said


@pytest.fixture
def llm(tiny: Folders) -> Iterator[LLM]:
    with LLM(model=str(tiny["old"]), **SIZE) as llm:
        yield llm
        llm.core.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_the_text_is_that_of_a_fresh_engine(
    tiny: Folders, weights: Weights, fresh: dict[str, Any], scheduler: str, kvcache: str, overlap: bool
) -> None:
    with LLM(model=str(tiny["old"]), scheduler=scheduler, kvcache=kvcache, overlap=overlap, **SIZE) as llm:
        for name in ("new", "old", "new"):
            llm.generate([PROMPT], GREEDY)
            llm.update_weights(weights[name])
            first, second = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
            assert first.token_ids == second.token_ids == fresh[name][:12]
            assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_stale_kv_would_have_changed_the_text(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    """What the two locks are for: the same weights put in place behind the core's back give other text."""
    assert text(llm) == fresh["old"][:12]
    llm.core.executor.update_weights(weights["new"])
    stale = llm.generate([PROMPT], GREEDY)[0]
    assert stale.cached_tokens == 8
    assert stale.token_ids != fresh["new"][:12]
    llm.update_weights(weights["new"])
    assert text(llm) == fresh["new"][:12]


@pytest.mark.parametrize("lock", ["reset", "fingerprint"])
def test_either_lock_is_enough(
    llm: LLM, weights: Weights, fresh: dict[str, Any], lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text(llm)
    if lock == "reset":  # the fingerprint stays
        own = llm.core.executor.update_weights
        was = llm.core.model.fingerprint
        monkeypatch.setattr(llm.core.executor, "update_weights", lambda *given: (own(*given), was)[1])
    else:
        monkeypatch.setattr(llm.core.kv, "reset", lambda: None)
    llm.update_weights(weights["new"])
    after = llm.generate([PROMPT], GREEDY)[0]
    assert (after.token_ids, after.cached_tokens) == (fresh["new"][:12], 0)


# ---- what becomes of open requests


def test_refuse_changes_nothing(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    stream = llm.stream(PROMPT, LONG)
    tokens = next(stream).token_ids
    was = llm.core.model
    with pytest.raises(EngineError, match="1 requests have begun"):
        llm.update_weights(weights["new"])
    assert llm.core.model == was
    assert sum((chunk.token_ids for chunk in stream), tokens) == fresh["old"]


def test_a_request_that_has_not_begun_is_no_obstacle(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    text(llm)
    waiting = llm.core.add(PROMPT, LONG)
    stream = llm.stream(PROMPT, LONG)
    llm.update_weights(weights["new"])
    assert sum((chunk.token_ids for chunk in stream), ()) == tuple(waiting.output) == fresh["new"]
    later = llm.core.add(PROMPT, LONG)
    assert later.namespace == waiting.namespace


def test_finish_is_to_the_end_by_the_old_ones(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    streams = [llm.stream(PROMPT, LONG) for _ in range(3)]
    tokens = next(streams[0]).token_ids
    llm.update_weights(weights["new"], running="finish")
    assert sum((chunk.token_ids for chunk in streams[0]), tokens) == fresh["old"]
    assert all(sum((chunk.token_ids for chunk in stream), ()) == fresh["old"] for stream in streams[1:])
    assert text(llm) == fresh["new"][:12]


@pytest.mark.parametrize("overlap", [False, True])
def test_recompute_goes_on_after_the_text_there_is(
    tiny: Folders, weights: Weights, fresh: dict[str, Any], overlap: bool
) -> None:
    with LLM(model=str(tiny["old"]), overlap=overlap, **SIZE) as llm:
        streams = [llm.stream([*PROMPT, last], LONG) for last in (1, 2, 3)]
        before = [sum((next(stream).token_ids for _ in range(5)), ()) for stream in streams]
        llm.update_weights(weights["new"], running="recompute")
        known = [llm.core.requests[stream.request_id].num_output for stream in streams]
        texts = [
            sum((chunk.token_ids for chunk in stream), start) for stream, start in zip(streams, before, strict=True)
        ]
        llm.core.check()
        again = llm.generate([[*PROMPT, 1, *texts[0]]], GREEDY)[0]
        assert again.cached_tokens == 52  # what the new weights computed is known by its new name
    with LLM(model=str(tiny["old"]), **SIZE) as llm:
        olds = [text(llm, [*PROMPT, last], LONG) for last in (1, 2, 3)]
    with LLM(model=str(tiny["new"]), **SIZE) as llm:
        for last, whole, old, kept in zip((1, 2, 3), texts, olds, known, strict=True):
            assert whole[:kept] == old[:kept]
            rest = SamplingParams(temperature=0, max_tokens=40 - kept)
            assert whole[kept:] == text(llm, [*PROMPT, last, *whole[:kept]], rest) != old[kept:]


def test_abort_ends_them_and_says_why(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    llm.update_weights(weights["new"], running="abort")
    last = list(stream)[-1]
    assert (last.finish_reason, last.detail) == ("abort", "the weights were replaced")
    assert llm.core.stats()["pages_pinned"] == 0
    assert text(llm) == fresh["new"][:12]


def test_what_becomes_of_them_is_one_of_four(llm: LLM, weights: Weights) -> None:
    with pytest.raises(EngineError, match="refuse, recompute or abort"):
        llm.update_weights(weights["new"], running="whatever")  # type: ignore[arg-type]


# ---- the weights


def test_some_weights_a_function_and_a_path(llm: LLM, tiny: Folders, weights: Weights, fresh: dict[str, Any]) -> None:
    norm = "model.norm.weight"
    llm.update_weights({norm: weights["old"][norm] * -1})
    assert text(llm) != fresh["old"][:12]
    llm.update_weights(lambda now: {norm: -now[norm]})
    assert text(llm) == fresh["old"][:12]
    llm.update_weights(tiny["new"])
    assert text(llm) == fresh["new"][:12]


def test_they_are_copied(llm: LLM, weights: Weights, fresh: dict[str, Any]) -> None:
    """A trainer goes on changing its own, in place."""
    mine = {name: tensor.clone() for name, tensor in weights["new"].items()}
    llm.update_weights(mine)
    for tensor in (*mine.values(), *llm.weights().values()):
        tensor.zero_()
    assert text(llm) == fresh["new"][:12]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_can_be_read_back_bit_for_bit(tiny: Folders, weights: Weights, packed: bool, dtype: str) -> None:
    executor = {"name": "torch", "packed": packed, "dtype": dtype}
    with LLM(model=str(tiny["old"]), executor=executor, **SIZE) as llm:
        for name in ("old", "new"):
            read = llm.weights()
            assert "lm_head.weight" not in read  # tied
            assert all(torch.equal(read[key], weights[name][key].to(read[key].dtype)) for key in read)
            assert set(read) | {"lm_head.weight"} == set(weights[name])
            llm.update_weights(weights["new"])


def test_the_fingerprint_follows_the_content(llm: LLM, tiny: Folders, weights: Weights) -> None:
    loaded = llm.core.model.fingerprint
    new = llm.update_weights(weights["new"]).fingerprint
    assert llm.core.describe()["model"]["fingerprint"] == new != loaded
    old = llm.update_weights(weights["old"]).fingerprint
    assert old != new
    assert llm.update_weights(tiny["new"]).fingerprint == new  # by another way, in another order
    norm = "model.norm.weight"
    some = [llm.update_weights({norm: weights[name][norm] + 1}).fingerprint for name in ("old", "old")]
    assert len({loaded, old, new, *some}) == 5  # of a part, also what was there before counts
    assert llm.update_weights(weights["new"], version="7").fingerprint.endswith("@7:float32")
    assert llm.core.weights_epoch == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: {"model.nrom.weight": w["model.norm.weight"]}, "no weight 'model.nrom.weight'.*model.norm.weight"),
        (lambda w: {**w, "model.norm.weight": w["model.norm.weight"][1:]}, r"'model.norm.weight' is \[31\].*\[32\]"),
        (lambda w: {"model.norm.weight": [1.0] * 32}, "no tensor but list"),
        (lambda w: {**w, "lm_head.weight": w["lm_head.weight"] + 1}, "are one in this model, and they differ"),
        (lambda w: {}, "no weights were given"),
        (lambda w: 5, "tensors by name, not int"),
        (lambda w: "no/such/folder", "no/such/folder"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    llm: LLM, weights: Weights, fresh: dict[str, Any], change: Any, words: str
) -> None:
    stream = llm.stream(PROMPT, LONG)
    tokens = next(stream).token_ids
    was = llm.core.model
    with pytest.raises(ModelError, match=words):
        llm.update_weights(change(dict(weights["new"])), running="abort")
    assert llm.core.model == was
    assert sum((chunk.token_ids for chunk in stream), tokens) == fresh["old"]


def test_an_executor_without_weights_says_so() -> None:
    core = make_core()
    with pytest.raises(ConfigError, match="executor scripted cannot change its weights"):
        core.update_weights({})
    core.close()


def test_the_simulated_model_has_weights_too() -> None:
    with LLM(executor="sim", audit=True) as llm, LLM(executor="sim") as other:
        one = text(llm)
        llm.update_weights({"step": 1})
        two = llm.generate([PROMPT], GREEDY)[0]
        assert two.token_ids != one
        assert two.cached_tokens == 0
        other.update_weights({"step": 1})
        assert text(other) == two.token_ids
        assert other.core.model == llm.core.model
        with pytest.raises(ModelError, match="plain values"):
            llm.update_weights({"step": object()})
        assert text(llm) == two.token_ids


def test_not_while_kv_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PATIENCE", 0.05)
    with LLM(executor="sim") as plain:
        connector = FaultyConnector(deaf=True)
        core = make_core(executor=plain.core.executor, connectors=[connector])
        core.transfer(Transfer("t", "pull", "r"))
        with pytest.raises(EngineError, match="KV of the old weights is being transferred"):
            core.update_weights({"step": 1})
        core.close()


def test_plugins_are_told() -> None:
    heard: list[ModelInfo] = []

    class Listens(Policy):
        name = "listens"

        def weights_changed(self, model: ModelInfo) -> None:
            heard.append(model)

    with LLM(executor="sim") as plain:
        core = make_core(executor=plain.core.executor, policies=[Listens()])
        assert heard == []
        assert [core.update_weights({"step": 1})] == heard


# ---- through AsyncEngine


async def said(engine: AsyncEngine, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return (await engine.complete(PROMPT, params)).token_ids


def test_an_engine_in_a_thread(tiny: Folders, weights: Weights, fresh: dict[str, Any]) -> None:
    async def main() -> None:
        config = EngineConfig(model=str(tiny["old"]), **SIZE)
        async with await AsyncEngine.start(config, in_process=True) as engine:
            assert await said(engine) == fresh["old"][:12]
            began = asyncio.create_task(said(engine, LONG))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="have begun"):
                await engine.update_weights(weights["new"])
            update = asyncio.create_task(engine.update_weights(weights["new"], running="finish"))
            await asyncio.sleep(0)
            after = asyncio.create_task(said(engine, LONG))
            model = await update
            assert engine.model is model
            assert (await began, await after) == (fresh["old"], fresh["new"])
            with pytest.raises(ModelError, match="no weight 'x'"):
                await engine.update_weights({"x": weights["new"]["model.norm.weight"]})
            assert await said(engine) == fresh["new"][:12]

    asyncio.run(main())


def test_an_engine_in_a_process_of_its_own_reads_them_from_a_path(
    tiny: Folders, weights: Weights, fresh: dict[str, Any]
) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(EngineConfig(model=str(tiny["old"]), **SIZE)) as engine:
            with pytest.raises(ConfigError, match="give the path of a model, or start the engine with in_process=True"):
                await engine.update_weights(weights["new"])
            assert await said(engine) == fresh["old"][:12]
            await engine.update_weights(tiny["new"])
            assert await said(engine) == fresh["new"][:12]
            with pytest.raises(ModelError, match="no/such/model"):
                await engine.update_weights("no/such/model/here")

    asyncio.run(main())
