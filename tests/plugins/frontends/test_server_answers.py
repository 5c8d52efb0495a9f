"""Large answers are written and sent in pieces, and forgotten where nobody waits (case B51)."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import AsyncEngine, EngineConfig, InvalidRequest
from engine.core.outputs import Chunk
from engine.core.sampling import TokenLogprobs
from engine.plugins.frontends._aside import MUCH, Aside
from engine.plugins.frontends._life import Life
from engine.plugins.frontends._openai_routes import Routes
from engine.plugins.frontends._watched import PIECE, Answered, Watched
from engine.plugins.frontends._wire import to_json
from engine.plugins.frontends._written import CHUNK, ITEMS, InPieces, chunks
from engine.plugins.frontends.openai import OpenAIFrontend

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=2).map(lambda some: some * ITEMS)
    ),
    max_leaves=6,
)


@given(VALUES)
def test_pieces_are_the_same_text(value: Any) -> None:
    assert b"".join(chunks(value)) == to_json(value)


def test_pieces_are_neither_tiny_nor_large() -> None:
    entry = msgspec.Raw(to_json({"token": "x" * 1000}))
    value = {"choices": [{"index": index, "logprobs": {"content": [entry] * 900}} for index in range(3)], "usage": {}}
    sizes = [len(piece) for piece in chunks(value)]
    assert len(sizes) > 10
    assert all(CHUNK <= size < 2 * CHUNK + ITEMS * 1100 for size in sizes[:-1])


def test_each_piece_is_sent_with_the_length_of_all() -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    value = {"a": ["x" * 1000] * 500}
    response = InPieces(value, {"x-request-id": "1"})
    asyncio.run(response({}, None, send))  # type: ignore[arg-type]
    head, *bodies = messages
    assert dict(head["headers"])[b"content-length"] == str(len(to_json(value))).encode()
    assert dict(head["headers"])[b"content-type"] == b"application/json"
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]
    assert b"".join(one["body"] for one in bodies) == to_json(value)


def test_others_have_their_turn_while_a_client_reads_as_fast_as_it_is_sent(engine: AsyncEngine) -> None:
    """Nothing makes us wait then: an answer of many pieces would be sent in one go."""
    turns: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (4 * PIECE), "more_body": False})

    async def main() -> None:
        async def send(message: Any) -> None:
            turns.append("sent")

        async def other() -> None:
            while turns.count("sent") < 5:
                turns.append("other")
                await asyncio.sleep(0)

        watched = Watched(app, life=Life(engine, 1), answered=Answered(), patience=60, log=False)
        task = asyncio.create_task(other())
        await watched({"type": "http", "method": "GET", "path": "/"}, None, send)  # type: ignore[arg-type]
        await task

    asyncio.run(main())
    first = turns.index("sent")
    assert turns[first:].count("other") >= 3


def test_what_is_refused_leaves_nothing_behind() -> None:
    """An error that knew its own task would keep the whole body until garbage is collected, which is seldom."""

    class Large:
        pass

    seen: list[weakref.ref[Large]] = []

    def work() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise InvalidRequest("body", "is too large")

    async def main() -> None:
        with pytest.raises(InvalidRequest):
            await Aside().run(work)

    gc.disable()
    try:
        asyncio.run(main())
        assert [one() for one in seen] == [None]
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    yield engine
    engine.shutdown()


def test_a_large_answer_is_whole(engine: AsyncEngine) -> None:
    import httpx

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=OpenAIFrontend().app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            asked = {"prompt": [1, 2], "n": 8, "max_tokens": 200, "logprobs": 5, "ignore_eos": True, "seed": 1}
            return await http.post("/v1/completions", json=asked)

    answer = asyncio.run(main())
    assert int(answer.headers["content-length"]) == len(answer.content) > CHUNK > MUCH
    choices = json.loads(answer.content)["choices"]
    assert [len(one["logprobs"]["tokens"]) for one in choices] == [200] * 8


class Counted:
    """Answers that say nothing, and keep what they are told in the end."""

    def __init__(self) -> None:
        self.ends: list[Chunk] = []

    def openings(self, count: int) -> list[Any]:
        return []

    def piece(self, index: int, chunk: Chunk) -> str:
        return chunk.text

    def last(self, ends: list[Chunk]) -> None:
        self.ends = ends


def test_of_choices_that_have_ended_a_stream_keeps_their_counts_alone() -> None:
    """A last piece may bring all of a choice: those of a hundred choices, freed at once, would hold everybody up."""
    found = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in range(3))
    end = Chunk("abc", (0, 1, 2), "length", None, 5, 9, 4, logprobs=found, prompt_logprobs=found)

    async def pieces() -> AsyncIterator[tuple[int, Chunk]]:
        for index in (1, 0):
            yield index, end

    async def main() -> list[Any]:
        routes, answers = Routes.__new__(Routes), Counted()
        routes.aside = Aside()
        told = [event async for event in routes._events(2, pieces(), answers)]  # type: ignore[arg-type]
        assert answers.ends == [Chunk("", (), "length", None, 5, 9, 4)] * 2
        return told

    assert asyncio.run(main()) == ["abc", "abc", "[DONE]"]
