"""Outputs on their way: bounded messages, a reader that is behind, and a loop that has time for others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.core import Delta, TokenLogprobs
from engine.core.serve import flow
from engine.core.serve.asks import Ask
from engine.core.serve.messages import Outputs, Started

ONE = TokenLogprobs(1, -1.0, 1, tuple(range(20)), (-1.0,) * 20)


def weight(delta: Delta) -> int:
    return 1 + 21 * (len(delta.logprobs) + len(delta.prompt_logprobs)) // flow.PARTS_OF_LOGPROBS


@given(st.lists(st.integers(0, 300), max_size=600), st.booleans())
def test_a_step_travels_in_messages_of_bounded_size(logprobs: list[int], starts: bool) -> None:
    deltas = [Delta(str(number), (1,), prompt_logprobs=(ONE,) * count) for number, count in enumerate(logprobs)]
    started = [Started("0", 0.1, "none")] if starts else []
    found = list(flow.pieces(deltas, started))
    assert [delta for message in found for delta in message.deltas] == deltas
    assert [one for message in found for one in message.started] == started
    assert not started or found[0].started == started  # before their first news
    for message in found:
        assert len(message.deltas) <= 1 or sum(map(weight, message.deltas)) <= flow.MOST_WEIGHT


def test_a_core_waits_for_a_reader_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what nobody reads there are so many messages under way and no more; read, it goes on to its end."""
    monkeypatch.setattr(flow, "MOST_UNTAKEN", 100)
    emitted = []
    wait = threading.Event()

    async def main() -> None:
        engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
        try:
            host: Any = engine._link._transport._host  # type: ignore[attr-defined]
            real = host._emit

            def emit(event: Any) -> None:
                emitted.append(isinstance(event, Outputs))
                real(event)

            host._emit = emit
            group = engine.submit_many([Ask(tokens=[1, 2, 3], params=SamplingParams(max_tokens=400, ignore_eos=True))])
            before = -1
            while before != sum(emitted) or not before:  # this loop is kept busy, as by a long call
                before = sum(emitted)
                wait.wait(0.3)
            assert before == 100
            assert not host.busy  # it does not stand still for want of progress
            ends = [chunk async for _, chunk in group if chunk.finish_reason]
            assert ends[0].output_tokens == 400
        finally:
            await engine.close()

    asyncio.run(main())


def test_others_have_their_turn_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def main() -> None:
        monkeypatch.setattr(flow, "SLICE_SECONDS", 0.0)  # no time: one call would be too many, and there is one each
        told: list[int] = []
        inbox = flow.Inbox(told.append)
        inbox.put(order.append, "nobody", counts=True)  # there is no loop yet
        inbox.bind(asyncio.get_running_loop())
        for number in range(3):
            inbox.put(order.append, str(number), counts=True)
        for _ in range(4):
            order.append("other")
            await asyncio.sleep(0)
        assert order == ["other", "0", "other", "1", "other", "2", "other"]
        for _ in range(flow.TOLD_AFTER - 4):
            inbox.put(order.append, "more", counts=True)
        while inbox._calls:
            await asyncio.sleep(0)
        assert told == [flow.TOLD_AFTER]

    asyncio.run(main())


def test_a_call_that_raises_does_not_keep_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    async def main() -> None:
        inbox = flow.Inbox(lambda count: None)
        inbox.bind(asyncio.get_running_loop())
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: done.append(context["exception"]))
        inbox.put({}.__getitem__, "x")  # type: ignore[arg-type]
        inbox.put(done.append, "next")
        while len(done) < 2:
            await asyncio.sleep(0)
        assert isinstance(done[0], KeyError)
        assert done[1] == "next"

    asyncio.run(main())


def test_calls_wait_for_no_loop_that_is_closed() -> None:
    told: list[int] = []
    inbox = flow.Inbox(told.append)

    async def bind() -> None:
        inbox.bind(asyncio.get_running_loop())

    asyncio.run(bind())
    for _ in range(flow.TOLD_AFTER):
        inbox.put(told.append, -1, counts=True)
    assert told == [flow.TOLD_AFTER]
