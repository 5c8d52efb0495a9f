"""The cache of an engine in a thread and in a process of its own: questions, events, and the engine's death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import AsyncEngine, ConfigError, EngineConfig, EngineDead, EngineError, InvalidRequest, SamplingParams
from engine.core import CacheBatch, CacheIndex, TooOld

ONE = SamplingParams(max_tokens=1)


def sim_config(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate({"executor": "sim", **fields})


@pytest.fixture(scope="module", params=["thread", "process"])
def told(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    engine = AsyncEngine.launch(
        sim_config(cache_events="on", page_size=4, num_pages=32, audit=True), in_process=request.param == "thread"
    )
    home = Path(engine.description["cache_events"]["private"]["events"].removeprefix("ipc://")).parent
    assert home.stat().st_mode & 0o77 == 0
    yield engine
    assert engine.health().ok
    engine.shutdown()
    assert not home.exists()


async def index_of(engine: AsyncEngine) -> CacheIndex:
    index = CacheIndex()
    index.load(await engine.cache.snapshot())
    return index


def test_an_index_follows_from_elsewhere(told: AsyncEngine) -> None:
    async def follow() -> None:
        index = await index_of(told)
        with told.cache.reader() as reader:
            stream = reader.follow(await reader.replay(index.epoch, index.sequence))
            for n in range(12):  # more than fits
                await told.complete([n] * 17, ONE)
            dump = await told.cache.dump()
            async for batch in stream:
                assert index.apply(batch) == "nothing"
                if index.sequence == dump["sequence"]:
                    break
            await stream.aclose()
        assert sorted(key.hex() for key in index.pages()) == dump["keys"]
        assert (await told.cache.stats())["evicted_pages"] > 0

    asyncio.run(follow())


def test_a_reader_closes_gaps(told: AsyncEngine) -> None:
    async def lose() -> None:
        index = await index_of(told)
        await told.complete([100] * 17, ONE)
        with told.cache.reader() as reader:
            later = await reader.replay(None, index.sequence + 2)
            assert later.events
            start = CacheBatch(later.epoch, index.sequence, 4, [])
            stream = reader.follow(start)
            assert index.apply(await anext(stream)) == "nothing"
            while index.sequence < later.end:  # asked for, as the first sign of life shows that some are missing
                assert index.apply(await anext(stream)) == "nothing"
            await stream.aclose()

    asyncio.run(lose())


def test_a_flush_ends_the_stream(told: AsyncEngine) -> None:
    async def flush() -> None:
        with told.cache.reader() as reader:
            first = await reader.replay(None, 0)
            stream = reader.follow(first)
            await anext(stream)
            assert (await told.cache.flush())["epoch"] != first.epoch
            with pytest.raises(TooOld, match="take a snapshot"):
                async for _ in stream:
                    pass

    asyncio.run(flush())


def test_explain_says_the_same_as_at_home(told: AsyncEngine) -> None:
    async def explain() -> None:
        await told.complete([200] * 17, ONE)
        found = await told.cache.explain([200] * 17)
        assert (found["cached_pages"], found["missing"]["why"]) == (4, "last")
        assert (await told.cache.explain([200] * 17, salt="x"))["missing"]["why"] == "salt"
        with pytest.raises(InvalidRequest, match="is empty") as refused:
            await told.cache.explain([])
        assert refused.value.field == "prompt"
        with pytest.raises(EngineError, match="cannot be asked"):
            await told.ask_cache("weather")

    asyncio.run(explain())


def test_events_that_are_off_are_named() -> None:
    engine = AsyncEngine.launch(sim_config(), in_process=True)
    try:
        with pytest.raises(ConfigError, match="--cache-events on"):
            engine.cache.reader()
        with pytest.raises(ConfigError, match="--cache-events on"):
            asyncio.run(engine.cache.dump())
    finally:
        engine.shutdown()


def test_readers_are_told_of_the_engines_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.core.serve.cache.SILENCE", 0.2)
    engine = AsyncEngine.launch(sim_config(cache_events="on"))

    async def die() -> None:
        with engine.cache.reader() as reader:
            stream = reader.follow(await reader.replay(None, 0))
            await anext(stream)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDead):
                async for _ in stream:
                    pass

    home = Path(engine.description["cache_events"]["private"]["events"].removeprefix("ipc://")).parent
    try:
        asyncio.run(die())
    finally:
        engine.shutdown()
    assert not home.exists()
