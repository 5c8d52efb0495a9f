"""What callers see when the core dies, freezes or fails (case B46). Nobody may hang, whatever happens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq

from engine import AsyncEngine, EngineConfig, EngineDead, SamplingParams
from engine.core.serve.transport import ProcessTransport

LONG = SamplingParams(max_tokens=8000)
PATIENCE = 30.0  # seconds until "hangs"; deaths are noticed in a fraction of it


def config(**options: Any) -> EngineConfig:
    return EngineConfig.model_validate({"executor": {"name": "sim", "step_ms": 5, **options}})


def faulty() -> EngineConfig:
    return EngineConfig.model_validate({"executor": {"name": "faulty_executor:FaultyExecutor", "step_ms": 1}})


async def ending(engine: AsyncEngine, tokens: list[int], stream: bool, wish: SamplingParams = LONG) -> str:
    """How a request ended: its finish reason, or its error."""
    try:
        if not stream:
            return (await engine.complete(tokens, wish)).finish_reason
        reasons = [chunk.finish_reason async for chunk in engine.generate(tokens, wish)]
        return str(reasons[-1])
    except EngineDead as error:
        return f"dead: {error}"


async def five_and_five(engine: AsyncEngine) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(ending(engine, [n + 1, 2], stream=n % 2 == 0)) for n in range(10)]
    while (await engine.stats())["running"] < 10:
        await asyncio.sleep(0.01)
    return tasks


async def all_dead(engine: AsyncEngine, tasks: list[asyncio.Task[str]], words: str) -> None:
    ends = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert [end for end in ends if not (end.startswith("dead: ") and re.search(words, end))] == []
    health = engine.health()
    assert not health.ok
    assert re.search(words, health.cause or "")
    assert health.open_requests == 0
    assert sum(engine.ledger.ended.values()) == engine.ledger.accepted
    with pytest.raises(EngineDead, match=words):
        await asyncio.wait_for(engine.complete([1], LONG), PATIENCE)
    with pytest.raises(EngineDead, match=words):
        await asyncio.wait_for(engine.stats(), PATIENCE)


def test_killed() -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config()) as engine:
            tasks = await five_and_five(engine)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            began = time.monotonic()
            await all_dead(engine, tasks, "SIGKILL")
            assert time.monotonic() - began < 10

    asyncio.run(main())


def test_stopped() -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config(), heartbeat_timeout=1.5) as engine:
            tasks = await five_and_five(engine)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            await all_dead(engine, tasks, "no sign of life")

    asyncio.run(main())


def test_an_event_that_cannot_be_read_is_the_engines_death() -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config()) as engine:
            tasks = await five_and_five(engine)
            transport = engine._link._transport
            assert isinstance(transport, ProcessTransport)
            with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
                intruder.connect(f"ipc://{transport._directory}/events")
                intruder.send(b"no event at all")
                await all_dead(engine, tasks, "could not be handled: .*Error")
            assert transport.process.wait(PATIENCE) == -signal.SIGKILL

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_signals_to_the_group_leave_the_end_to_the_parent(number: int) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config()) as engine:
            open_one = asyncio.create_task(ending(engine, [1], stream=True, wish=SamplingParams(max_tokens=100)))
            assert engine.pid is not None
            os.kill(engine.pid, number)
            assert await open_one == "length"

    asyncio.run(main())


@pytest.mark.parametrize("in_process", [True, False])
def test_an_exception_that_escapes_a_step_is_fatal(
    faults: ModuleType, in_process: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(faulty(), in_process=in_process) as engine:
            tasks = await five_and_five(engine)
            tasks.append(asyncio.create_task(ending(engine, [faults.ESCAPE], stream=True)))
            await all_dead(engine, tasks, "something nobody expected")

    asyncio.run(main())
    assert "Escape: something nobody expected" in capfd.readouterr().err  # the traceback is there to be read


@pytest.mark.parametrize("in_process", [True, False])
def test_a_step_that_fails_ends_its_requests_and_no_others(faults: ModuleType, in_process: bool) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(faulty(), in_process=in_process) as engine:
            tasks = await five_and_five(engine)
            tasks.append(asyncio.create_task(ending(engine, [faults.RAISE], stream=False)))
            assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE) == ["error"] * 11
            bad = await engine.complete([faults.ROW_ERROR], SamplingParams(max_tokens=5))
            assert (bad.finish_reason, bad.detail) == ("error", "this row is bad")
            assert engine.health().ok
            after = await engine.complete([1, 2], SamplingParams(max_tokens=5))
            assert after.finish_reason == "length"
            stats = await engine.stats()
            assert (stats["pages_pinned"], stats["finished_error"]) == (0, 12)

    asyncio.run(main())


def test_a_step_that_never_ends_is_a_stall(faults: ModuleType) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(faulty(), step_timeout=1.5) as engine:
            tasks = await five_and_five(engine)
            tasks.append(asyncio.create_task(ending(engine, [faults.SLEEP], stream=True)))
            await all_dead(engine, tasks, "no step has finished")

    asyncio.run(main())


def test_a_long_step_is_no_stall_and_no_death(faults: ModuleType) -> None:
    async def main() -> None:
        async with await AsyncEngine.start(config(step_ms=1500), heartbeat_timeout=1.0) as engine:
            assert await ending(engine, [1], stream=True, wish=SamplingParams(max_tokens=2)) == "length"
            assert engine.health().ok

    asyncio.run(main())


def test_the_core_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from engine import AsyncEngine, EngineConfig\n"
        "engine = AsyncEngine.launch(EngineConfig.model_validate({'executor': 'sim'}))\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
    assert list(tmp_path.glob("engine-*")) == []  # the sockets are gone too


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
