"""An engine is a guest in somebody's process: it changes nothing there, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, AsyncEngine, EngineConfig, EngineDead, SamplingParams
from engine.core import ExecutionError
from engine.testing import ShadowExecutor, make_core

WORLD = Path(__file__).with_name("world.py")
TEN = SamplingParams(max_tokens=10)
ENDLESS = SamplingParams(max_tokens=8000)


def run(code: str, seconds: float = 60) -> str:
    """Run a program that must end by itself, with exit code 0."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


# ---- it changes nothing, and leaves nothing


def differences(kind: str, scratch: Path) -> dict[str, list[object]]:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        [sys.executable, str(WORLD), kind], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["script", "script, overlap", "thread", "process"])
def test_the_process_is_afterwards_as_it_was(kind: str, tmp_path: Path) -> None:
    assert differences(kind, tmp_path) == {}


@pytest.mark.model
def test_with_a_model_only_the_first_import_of_torch_changes_something(tmp_path: Path) -> None:
    """Importing libraries adds filters for warnings, draws a random number, and torch names a folder for its compiler:
    nothing else, so none of it is the engine's own. A second engine changes nothing at all."""
    found = differences("torch", tmp_path)
    assert found.pop("again") == {}
    before, after = found.pop("environment", [{}, {}])
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert set(after) - set(before) <= {"TORCHINDUCTOR_CACHE_DIR"}
    assert {name: after[name] for name in before} == before
    made = found.pop("temporary files", [[], []])
    assert all(str(name).startswith("torchinductor_") for name in set(made[1]) - set(made[0]))  # type: ignore[call-overload]
    assert set(found) <= {"warnings", "random"}


def test_a_start_that_failed_leaves_nothing_either() -> None:
    threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")
    for _ in range(2):
        with pytest.raises(Exception, match="nonsense"):
            LLM(executor="sim", kvcache="nonsense", overlap=True)
        for in_process in (True, False):
            with pytest.raises(Exception, match="nonsense"):
                AsyncEngine.launch(EngineConfig(executor="sim", kvcache="nonsense"), in_process=in_process)
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == len(files)


# ---- close


def test_close_ends_what_runs_and_says_why() -> None:
    llm = LLM(executor="sim")
    streams = [llm.stream([1], ENDLESS), llm.stream([2], ENDLESS)]
    next(streams[0])
    mine = llm.core.add([3], ENDLESS)
    llm.step()
    for _ in range(3):
        llm.close()
    for stream in streams:
        last = list(stream)[-1]
        assert (last.finish_reason, last.detail) == ("abort", "the engine was closed")
    assert (mine.finish, mine.detail) == ("abort", "the engine was closed")
    assert llm.core.stats()["pages_pinned"] == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.generate([1], TEN),
        lambda llm: llm.stream([1], TEN),
        lambda llm: llm.step(),
        lambda llm: llm.update_weights({"step": 1}),
        lambda llm: llm.weights(),
        lambda llm: llm.core.add([1], TEN),
        lambda llm: llm.core.step(),
        lambda llm: llm.core.update_weights({"step": 1}),
    ],
)
def test_use_after_close_is_an_error(use: Callable[[LLM], object]) -> None:
    llm = LLM(executor="sim")
    llm.close()
    with pytest.raises(EngineDead, match="the engine was closed"):
        use(llm)


@pytest.mark.parametrize("in_process", [True, False])
def test_an_asynchronous_engine_likewise(in_process: bool) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig(executor="sim"), in_process=in_process)
        running = asyncio.create_task(engine.complete([1], ENDLESS))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        for _ in range(3):
            await engine.close()
        with pytest.raises(EngineDead, match="the engine was closed"):
            await running
        for use in (engine.complete([1], TEN), engine.stats(), engine.update_weights({"step": 1})):
            with pytest.raises(EngineDead, match="the engine was closed"):
                await use
        assert engine.health().cause == "the engine was closed"
        assert engine.ledger.ended["error"] == 1

    asyncio.run(main())


# ---- nobody closes


def test_a_forgotten_engine_is_collected() -> None:
    before = set(threading.enumerate())
    llm = LLM(executor="sim", overlap=True)
    llm.generate([1], TEN)
    assert len(set(threading.enumerate()) - before) == 1
    del llm
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_interpreter_ends_although_nobody_closed(overlap: bool) -> None:
    run(f"""
        from engine import LLM, SamplingParams
        llm = LLM(executor={{"name": "sim", "step_ms": 1}}, overlap={overlap})
        stream = llm.stream([1], SamplingParams(max_tokens=8000))
        next(stream)
    """)


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("end", ["", "raise SystemExit", "del engine, stream; import gc; gc.collect()"])
def test_it_ends_although_an_asynchronous_engine_runs(in_process: bool, end: str) -> None:
    pid = run(f"""
        import asyncio
        from engine import AsyncEngine, EngineConfig, SamplingParams
        config = EngineConfig(executor={{"name": "sim", "step_ms": 1}})
        engine = AsyncEngine.launch(config, in_process={in_process})
        async def main():
            stream = engine.generate([1], SamplingParams(max_tokens=8000))
            await anext(stream)
            return stream
        stream = asyncio.run(main())
        print(engine.pid)
        {end}
    """)
    if not in_process:
        gone_within(float(10), int(pid))


def test_what_nobody_closed_is_closed_at_the_end() -> None:
    """In good order, plugins included."""
    said = run("""
        from engine import AsyncEngine, EngineConfig
        from engine.core import Policy
        class Noisy(Policy):
            "Says when it is closed."
            name = "noisy"
            def close(self):
                print("closed", flush=True)
        AsyncEngine.launch(EngineConfig(executor="sim", policies=["__main__:Noisy"]), in_process=True)
        print("end of the program", flush=True)
    """)
    assert said.splitlines() == ["end of the program", "closed"]


def gone_within(seconds: float, pid: int) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} outlives its parent"
        time.sleep(0.05)


# ---- fork


FORK = """
    import asyncio, os, sys
    from engine import LLM, AsyncEngine, EngineConfig, EngineDead, SamplingParams
    few = SamplingParams(max_tokens=3)
    engines = [AsyncEngine.launch(EngineConfig(executor="sim"), in_process=flag) for flag in (True, False)]
    llms = [LLM(executor="sim", overlap=flag) for flag in (True, False)]
    def ask():
        for engine in engines:
            yield lambda: asyncio.run(engine.complete([1], few))
        for llm in llms:
            yield lambda: llm.generate([1], few)
    for use in ask():
        use()
    child = os.fork()
    if not child:
        for use in ask():
            try:
                use()
            except EngineDead as error:
                assert "is a fork of it" in str(error), error
            else:
                os._exit(3)
        for engine in engines:
            engine.shutdown()
        for llm in llms:
            llm.close()
        END
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for use in ask():
        use()
    for engine in engines:
        assert engine.health().ok
        engine.shutdown()
    for llm in llms:
        llm.close()
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_fork_is_told_and_does_no_harm(end: str) -> None:
    run(FORK.replace("END", end))


# ---- Ctrl-C, as a notebook's stop button sends it


@pytest.fixture
def interrupt() -> Iterator[Callable[[float], None]]:
    timers: list[threading.Timer] = []

    def after(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield after
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_batch_leaves_an_engine_that_works(overlap: bool, interrupt: Callable[[float], None]) -> None:
    with LLM(executor={"name": "sim", "step_ms": 20}, overlap=overlap, audit=True) as llm:
        [alone] = llm.generate([7, 7], TEN)
        other = llm.stream([7, 7], TEN)
        tokens = next(other).token_ids
        interrupt(0.11)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[n] for n in range(20)], ENDLESS)
        assert tokens + sum((chunk.token_ids for chunk in other), ()) == alone.token_ids
        assert llm.generate([7, 7], TEN) == [alone]
        assert llm.core.stats()["pages_pinned"] == 0


def lines_of_a_run(stop_at: int, overlap: bool) -> tuple[int, list[Any] | None]:
    """Run five requests, raising ``KeyboardInterrupt`` at the n-th line that the core and its plugins execute.

    Returns how many lines there were, and the outputs; ``None`` where the engine says that it cannot go on.
    """
    core = make_core(kvcache="paged", executor=ShadowExecutor(), num_pages=16, max_running=3, overlap=overlap)
    requests = [core.add([1, 2, 3, 4, 5, number // 2], SamplingParams(max_tokens=6)) for number in range(5)]
    count = 0

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt
        return trace

    try:
        while core.has_work:
            sys.settrace(trace)  # type: ignore[arg-type]
            try:
                core.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        core.check()
    except ExecutionError as error:
        return count, None if "interrupted in the middle of its books" in str(error) else [str(error)]
    return count, [request.output for request in requests]


@pytest.mark.parametrize("overlap", [False, True])
def test_wherever_it_is_interrupted_it_says_the_same_or_that_it_cannot_go_on(overlap: bool) -> None:
    """Nearly always the first. ``ShadowExecutor`` would tell if anybody read KV that is not his."""
    lines, expected = lines_of_a_run(-1, overlap)
    seen = [lines_of_a_run(at, overlap)[1] for at in range(1, lines, lines // 80)]
    assert [outputs for outputs in seen if outputs is not None] == [expected] * (len(seen) - seen.count(None))
    assert seen.count(None) < len(seen) / 10
