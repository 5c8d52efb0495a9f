"""The decisions of an engine in a thread and in a process: recorded while it serves, decided anew, explained."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from engine import AsyncEngine, ConfigError, EngineConfig, EngineError, SamplingParams
from engine.core.errors import UnknownRequest
from engine.core.record.reading import read
from engine.core.record.story import find, tell
from engine.core.replay.log import replay
from engine.core.serve.asks import Ask

STOPS = tuple(range(0, 2500, 20))  # as many as one request may have


def config_of(**fields: object) -> EngineConfig:
    usual = {
        "executor": {"name": "sim", "vocab_size": 2500, "eos_id": 7}, "record": True, "record_mb": 256, "page_size": 16,
        "num_pages": 48, "max_model_len": 400, "max_batch_tokens": 96, "max_running": 16, "max_waiting": 60,
    }  # fmt: skip
    return EngineConfig.model_validate({**usual, **fields})


async def client(engine: AsyncEngine, rng: random.Random, over: asyncio.Event) -> None:
    """Asks again and again, mostly for beginnings that others have; sometimes it leaves, or has not much time."""
    while not over.is_set():
        tokens = [rng.randrange(6) * 50 + at for at in range(rng.choice((8, 30, 64, 90)))]
        tokens += [rng.randrange(2500) for _ in range(rng.randrange(1, 30))]
        ask = Ask(
            tokens=tokens, params=SamplingParams(max_tokens=rng.randrange(1, 60), stop_token_ids=STOPS),
            priority=rng.choice((0, 0, 1, 20)), metadata={"tenant": rng.choice("abc")},
            deadline=rng.choice((None, None, None, None, 0.0005)), salt=rng.choice(("", "", "s")),
        )  # fmt: skip
        group = engine.submit_many([ask])
        left = rng.randrange(2, 200)
        with suppress(EngineError):
            async for _ in group:
                left -= 1
                if not left:
                    group.abort()
        if rng.random() < 0.02:
            await asyncio.sleep(rng.random() * 0.02)


async def crowd(engine: AsyncEngine, steps: int) -> None:
    """Clients until so many steps are made; then all that is open ends."""
    over = asyncio.Event()
    clients = [asyncio.create_task(client(engine, random.Random(number), over)) for number in range(24)]
    while (await engine.stats())["steps"] < steps:
        await asyncio.sleep(0.05)
    over.set()
    await asyncio.gather(*clients)


@pytest.mark.parametrize(
    ("steps", "scheduler", "kvcache", "overlap", "policies"),
    [
        (10_000, "unified", "paged", False, ("fair-share",)),
        (3000, {"name": "radix", "policy": "lpm", "enable_priority_scheduling": True}, "radix", True, ()),
    ],
    ids=["unified-paged-sync", "radix-radix-overlap"],
)
def test_ten_thousand_steps_of_a_server_are_decided_equally(steps, scheduler, kvcache, overlap, policies, tmp_path):
    config = config_of(scheduler=scheduler, kvcache=kvcache, overlap=overlap, policies=policies)

    async def serve() -> None:
        async with await AsyncEngine.start(config) as engine:
            await crowd(engine, steps)
            status = await engine.record.status()
            assert status["whole"], status
            said = await engine.record.write(tmp_path / "server.jsonl")
            assert Path(said["path"]).stat().st_size == said["bytes"]

    asyncio.run(serve())
    log = read(tmp_path / "server.jsonl")
    ends = [end.finish for end in log.ends.values()]
    assert {"stop", "length", "abort", "timeout"} <= set(ends)
    assert sum(len(plan.partial) for plan in log.plans) > 50
    if scheduler == "unified":
        assert sum(len(plan.preempted) for plan in log.plans) > 5
    report = replay(log, "server")
    assert report.equal, "\n".join(report.divergence.lines())
    assert report.steps >= steps


@pytest.mark.parametrize("in_process", [True, False], ids=["thread", "process"])
def test_a_request_is_explained_by_the_id_that_its_caller_gave(in_process, tmp_path):
    async def serve() -> None:
        config = config_of(max_running=1, executor={"name": "sim", "step_ms": 2})
        async with await AsyncEngine.start(config, in_process=in_process) as engine:
            tokens = list(range(20))
            first = engine.submit_many([Ask(tokens=tokens, params=SamplingParams(max_tokens=300), request_id="long")])
            params = SamplingParams(max_tokens=2, n=2)
            later = engine.submit_many([Ask(tokens=tokens, params=params, request_id="late")])
            async for _ in first:
                one, two = await engine.record.explain("late")
                assert [one["live"]["position"], two["live"]["position"]] == [1, 2]
                if one["live"]["why"] != "behind":  # as long as no step has looked at it
                    break
            assert one["live"]["why"] == "run_slots"
            [running] = await engine.record.explain("long")
            assert running["live"]["state"] == "running"
            assert running["live"]["id"] in {said["id"] for said in (await engine.record.requests())["requests"]}
            first.abort()
            async for _ in later:
                pass
            one, two = await engine.record.explain("late")
            assert one["live"] is None
            assert [said["story"]["finish"] for said in (one, two)] == ["length", "length"]
            assert two["story"]["waits"][-1]["why"] == "run_slots"
            await engine.record.write(tmp_path / "log.jsonl")
            with pytest.raises(UnknownRequest, match="'nobody' does not live"):
                await engine.record.explain("nobody")
            assert await engine.record.off() == {"on": False}
            with pytest.raises(UnknownRequest, match="engine record on"):
                await engine.record.explain("late")
            with pytest.raises(ConfigError, match="not recorded"):
                await engine.record.write(tmp_path / "log.jsonl")
            assert (await engine.record.on())["whole"] is False
            log = read(tmp_path / "log.jsonl")
            assert tell(find(log, two["id"])) == two["story"]

    asyncio.run(serve())


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    async def serve() -> None:
        async with await AsyncEngine.start(config_of(), in_process=True) as engine:
            with pytest.raises(EngineError, match="Is a directory"):
                await engine.record.write(tmp_path)

    asyncio.run(serve())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be recorded"):
        AsyncEngine.launch(config_of(record_dir=str(tmp_path / "file" / "logs")), in_process=True)
