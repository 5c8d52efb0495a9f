"""AsyncEngine over a real core, in a thread and in a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine import (
    AsyncEngine,
    Chunk,
    Completion,
    EngineConfig,
    EngineDead,
    InvalidRequest,
    Pooling,
    QueueFull,
    SamplingParams,
)
from engine.core.errors import ConfigError, EngineError, ModelError, PluginError
from engine.core.serve.asks import Ask
from engine.core.serve.client import Made
from engine.core.serve.streams import Group
from engine.llm import LLM

SIM = {"name": "sim", "step_ms": 1}


def config(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate({"executor": SIM, **fields})


def params(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


async def idle(engine: AsyncEngine) -> dict[str, int | float]:
    """The engine's numbers once nothing runs; fails rather than wait for ever."""
    for _ in range(200):
        stats = await engine.stats()
        if not (stats["running"] or stats["waiting"]):
            return stats
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {stats}")


async def collect(engine: AsyncEngine, prompt: list[int] | str, wish: SamplingParams) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(prompt, wish)]


def test_stream_joined_is_the_completion(engine: AsyncEngine) -> None:
    async def main() -> tuple[list[Chunk], Completion]:
        return await collect(engine, "Once upon a time", params(40)), await engine.complete(
            "Once upon a time", params(40)
        )

    chunks, whole = asyncio.run(main())
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert len(whole.token_ids) == 40
    assert [chunk.finish_reason for chunk in chunks][-1] == whole.finish_reason == "length"
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert chunks[-1].output_tokens == 40


def test_vectors_cross_the_link(engine: AsyncEngine) -> None:
    """Bit for bit what an engine in this thread gives; each is counted once, as stopped."""
    prompts = [[n, 2, 3] * 20 for n in range(20)]

    async def main() -> list[bytes]:
        found = [await engine.embed(prompts[0], Pooling(kind="mean"))]
        found += await asyncio.gather(*(engine.embed(prompt, Pooling(kind="mean")) for prompt in prompts))
        return [one.data for one in found]

    before = engine.ledger.ended["stop"]
    first, *rest = asyncio.run(main())
    with LLM(executor="sim") as llm:
        assert rest == [one.data for one in llm.embed(prompts, Pooling(kind="mean"))]
    assert first == rest[0]
    assert engine.ledger.ended["stop"] - before == 21


def test_whoever_waits_for_a_vector_may_leave() -> None:
    engine = AsyncEngine.launch(config(), in_process=True)  # its own: who leaves at the very end is counted otherwise

    async def main() -> dict[str, int | float]:
        tasks = [asyncio.create_task(engine.embed([n] * 4000)) for n in range(30)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await idle(engine)

    assert asyncio.run(main())["pages_pinned"] == 0
    assert not len(engine.ledger)
    engine.shutdown()


def test_a_request_that_ends_without_a_vector_is_an_error(engine: AsyncEngine) -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match="there is no embedding: the request ended with timeout"):
            await asyncio.gather(*(engine.embed([n] * 8000, deadline=0.001) for n in range(8)))
        await idle(engine)

    asyncio.run(main())


def test_many_at_once_get_what_they_get_alone(engine: AsyncEngine) -> None:
    prompts = [[token, 2, 3] for token in range(64)]

    async def main() -> tuple[list[Completion], list[Completion]]:
        together = await asyncio.gather(*(engine.complete(prompt, params(10)) for prompt in prompts))
        return together, [await engine.complete(prompt, params(10)) for prompt in prompts]

    together, alone = asyncio.run(main())
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in together}) == 64


def test_closing_the_iterator_ends_the_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        before = (await idle(engine))["finished_abort"]
        stream = engine.generate([1, 2, 3], params(8000))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await idle(engine))["finished_abort"] == before + 1

    asyncio.run(main())


def test_cancelling_the_caller_ends_the_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        before = engine.ledger.ended["abort"]
        tasks = [asyncio.create_task(engine.complete([token], params(8000))) for token in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await idle(engine)
        assert engine.ledger.ended["abort"] == before + 5

    asyncio.run(main())


def test_two_live_requests_of_one_id_do_not_mix(engine: AsyncEngine) -> None:
    async def named(prompt: list[int], name: str) -> Completion:
        return await engine.complete(prompt, params(30), request_id=name)

    async def main() -> None:
        for name in ("same", "", "ü" * 1000, "x" * 1_000_000):
            one, two = await asyncio.gather(named([1], name), named([2], name))
            assert one.token_ids == (await engine.complete([1], params(30))).token_ids
            assert two.token_ids == (await engine.complete([2], params(30))).token_ids

    asyncio.run(main())


def test_abort_by_id_ends_all_of_that_id_and_no_other(engine: AsyncEngine) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(engine.complete([number], params(4000 if name == "bad" else 60), request_id=name))
            for number, name in enumerate(["bad", "good", "bad"])
        ]
        await asyncio.sleep(0.05)
        assert engine.abort("bad") == 2
        assert engine.abort("bad") == 0
        assert engine.abort("unknown") == 0
        assert [(await task).finish_reason for task in tasks] == ["abort", "length", "abort"]
        again = await engine.complete([0], params(3), request_id="bad")  # the id is free at once
        assert again.finish_reason == "length"
        await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("length", [1, 3])
def test_stop_string_ends_the_request_in_the_engine_and_does_not_leak(engine: AsyncEngine, length: int) -> None:
    async def main() -> None:
        text = (await engine.complete([5, 6, 7], params(60))).text
        middle = len(text) // 2
        stop = text[middle : middle + length]
        before = (await idle(engine))["finished_stop"]
        chunks = await collect(engine, [5, 6, 7], params(8000, stop=(stop,)))
        joined = "".join(chunk.text for chunk in chunks)
        assert joined == text[: text.index(stop)]
        assert (chunks[-1].finish_reason, chunks[-1].detail) == ("stop", stop)
        assert (await idle(engine))["finished_stop"] == before + 1

    asyncio.run(main())


def test_a_stop_string_that_never_comes_loses_no_text(engine: AsyncEngine) -> None:
    async def main() -> None:
        plain = await engine.complete([5, 6, 7], params(30))
        almost = plain.text[-1:] + "\x00never"
        assert (await engine.complete([5, 6, 7], params(30, stop=(almost,)))).text == plain.text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("tokens", "wish", "field"),
    [
        ([], params(1), "prompt"),
        ([-1], params(1), "prompt"),
        ([2**63], params(1), "prompt"),
        ([1], params(0), "max_tokens"),
        ([1], params(8192), "max_tokens"),
        ([1] * 8192, params(1), "prompt"),
        ([1], params(1, temperature=float("nan")), "temperature"),
        ([1], params(1, top_p=0.0), "top_p"),
        ([1], params(1, stop=("",)), "stop"),
        ([1], params(1, stop_token_ids=(49152,)), "stop_token_ids"),
    ],
)
def test_refused_before_anything_is_sent(
    engine: AsyncEngine, tokens: list[int], wish: SamplingParams, field: str
) -> None:
    async def main() -> None:
        accepted = engine.ledger.accepted
        with pytest.raises(InvalidRequest) as caught:
            await engine.complete(tokens, wish)
        assert caught.value.field == field
        assert engine.ledger.accepted == accepted
        assert (await idle(engine))["accepted"] == accepted

    asyncio.run(main())


def test_submission_of_several_is_all_or_none() -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config(max_running=2, max_waiting=2), in_process=True) as engine:
            asks = [Ask(tokens=[token], params=params(50)) for token in range(4)]
            with pytest.raises(InvalidRequest, match="at most 4"):
                engine.submit_many([*asks, asks[0]])
            one = engine.submit_many(asks[:1])
            with pytest.raises(QueueFull):
                engine.submit_many(asks)
            assert engine.health().open_requests == 1
            with pytest.raises(InvalidRequest):
                engine.submit_many([asks[0], Ask(tokens=[])])
            assert engine.health().open_requests == 1
            rest = engine.submit_many(asks[:3])  # more than the core's own queue holds: it waits its turn
            for group in (one, rest):
                ends = [chunk.finish_reason async for _, chunk in group if chunk.finish_reason]
                assert ends == ["length"] * len(group.streams)
            assert (await engine.stats())["accepted"] == engine.ledger.accepted == 4
            engine.submit_many(asks).abort()
            assert engine.health().open_requests == 0
            await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [True, False])
def test_many_are_made_elsewhere_and_submitted_as_ever(in_process: bool) -> None:
    """The message is made in a thread; whether there is room is asked again when it is there."""

    async def main() -> None:
        async with await AsyncEngine.start(config(max_running=2, max_waiting=2), in_process=in_process) as engine:
            asks = [Ask(tokens=[token], params=params(50)) for token in range(3)]
            others: list[Group] = []

            async def run(work: Callable[[], Made]) -> Made:
                assert engine.health().open_requests == 0
                made = await asyncio.to_thread(work)
                if crowd:
                    others.append(engine.submit_many(asks[:crowd]))
                return made

            crowd = 0
            group = await engine.submit_aside(asks, run)
            ends = [chunk.finish_reason async for _, chunk in group if chunk.finish_reason]
            assert ends == ["length"] * 3
            crowd = 2
            with pytest.raises(QueueFull):
                await engine.submit_aside(asks, run)
            assert engine.health().open_requests == 2
            with pytest.raises(InvalidRequest, match="at most 4"):
                await engine.submit_aside([*asks, *asks], run)
            others[0].abort()
            assert engine.ledger.accepted == 5
            await idle(engine)

    asyncio.run(main())


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"params": params(2, top_k=2**70)}),
    ("min_tokens", {"params": SamplingParams(min_tokens=2**70)}),
    ("stop", {"params": params(2, stop="END")}),
    ("max_tokens", {"params": SamplingParams(max_tokens=5.5)}),  # type: ignore[arg-type]
    ("seed", {"params": params(2, seed=1.5)}),
    ("temperature", {"params": params(2, temperature="1")}),
    ("priority", {"priority": 2**64}),
    ("priority", {"priority": "high"}),
    ("salt", {"salt": None}),
    ("request_id", {"request_id": 7}),
    ("metadata", {"metadata": {1: "a"}}),
    ("metadata", {"metadata": {"a": object()}}),
]


@pytest.mark.parametrize(("field", "options"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_types_cost_their_sender_a_refusal_and_nobody_anything(
    engine: AsyncEngine, field: str, options: dict[str, Any]
) -> None:
    async def main() -> None:
        neighbour = asyncio.create_task(engine.complete([1], params(20)))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest) as caught:
            await engine.complete([1], **options)
        assert caught.value.field == field
        assert (await neighbour).finish_reason == "length"
        assert engine.health().open_requests == 0
        await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("bad", [{"top_k": 2**70}, {"max_tokens": 5.5}, {"ignore_eos": "no"}], ids=str)
def test_what_slips_past_the_check_is_refused_and_leaks_nothing(bad: dict[str, Any]) -> None:
    """``checked`` is believed: what cannot be sent, or cannot be read over there, still ends one request only."""

    async def main() -> None:
        async with await AsyncEngine.start(config()) as engine:
            neighbour = asyncio.create_task(engine.complete([1], params(50)))
            await asyncio.sleep(0.02)
            asks = [Ask(tokens=[1], params=SamplingParams(**bad))] * 100
            for _ in range(30):  # 3000 is more than may be open
                with pytest.raises((InvalidRequest, EngineError)):
                    async for _ in engine.submit_many(asks, checked=True):
                        pass
                while engine.health().open_requests > 1:
                    await asyncio.sleep(0.01)
            assert engine.health().ok
            assert (await neighbour).finish_reason == "length"
            assert (await engine.complete([1], params(3))).finish_reason == "length"
            assert sum(engine.ledger.ended.values()) == engine.ledger.accepted

    asyncio.run(asyncio.wait_for(main(), 60))


def test_counts_agree_with_the_core(engine: AsyncEngine) -> None:
    async def main() -> None:
        await asyncio.gather(*(engine.complete([token], params(5)) for token in range(10)))
        stats = await idle(engine)
        assert stats["accepted"] == engine.ledger.accepted
        for reason, count in engine.ledger.ended.items():
            assert stats[f"finished_{reason}"] == count
        assert sum(engine.ledger.ended.values()) == engine.ledger.accepted

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"scheduler": "radixx"}, PluginError, "did you mean 'radix'"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len"),
        ({"executor": {"name": "sim", "step_mss": 1}}, ConfigError, "step_ms"),
        ({"executor": "torch", "model": "./nowhere.gguf"}, ModelError, "nowhere"),
    ],
)
def test_start_fails_with_the_cores_own_error(
    in_process: bool, fields: dict[str, object], kind: type[EngineError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        AsyncEngine.launch(config(**fields), in_process=in_process)


@pytest.mark.parametrize("in_process", [True, False])
def test_closed_means_closed(in_process: bool) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(config(), in_process=in_process)
        open_one = asyncio.create_task(engine.complete([1], params(8000)))
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineDead, match="closed"):
            await asyncio.wait_for(open_one, 10)
        for call in (lambda: engine.complete([1], params(1)), engine.stats):
            with pytest.raises(EngineDead, match="closed"):
                await call()

    asyncio.run(main())


def test_one_engine_serves_one_event_loop_after_the_other(engine: AsyncEngine) -> None:
    call: Callable[[], Completion] = lambda: asyncio.run(engine.complete([9], params(4)))  # noqa: E731
    assert call() == call()


async def choices_of_many() -> None:
    async with await AsyncEngine.start(config(max_waiting_tokens=100), in_process=True) as engine:
        wish = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=1)
        group = engine.submit_many([Ask(tokens=[1, 2], params=wish), Ask(tokens=[3], params=wish)])
        found: dict[int, list[int]] = {index: [] for index in range(6)}
        async for index, chunk in group:
            found[index] += chunk.token_ids
            assert [one.token for one in chunk.logprobs] == list(chunk.token_ids)
        assert len({tuple(tokens) for tokens in found.values()}) == 6
        for choice in range(3):
            alone = await engine.complete([3], replace(wish, n=1, choice=choice))
            assert list(alone.token_ids) == found[3 + choice]
        with pytest.raises(InvalidRequest, match="one choice"):
            await engine.complete([1], wish)
        with pytest.raises(InvalidRequest, match="180 tokens in 3 sequences, at most 100"):
            engine.submit_many([Ask(tokens=[1] * 60, params=wish)])
        late = await engine.complete([1], SamplingParams(), deadline=0.0)
        assert late.finish_reason == "timeout"
        assert engine.ledger.waiting_tokens == len(engine.ledger) == 0


def test_choices_of_many_prompts() -> None:
    asyncio.run(choices_of_many())
