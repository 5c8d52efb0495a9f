"""The official client against real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest


def client(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


async def streamed(sdk: openai.AsyncOpenAI, n: int, tokens: int, leave_after: int | None = None) -> str:
    text = ""
    stream = await sdk.completions.create(model="sim", prompt=[n, n + 1], max_tokens=tokens, stream=True, temperature=0)
    pieces = 0
    async with stream:
        async for event in stream:
            text += event.choices[0].text
            pieces += 1
            if pieces == leave_after:
                break
    return text


async def whole(sdk: openai.AsyncOpenAI, n: int, tokens: int) -> str:
    answer = await sdk.completions.create(model="sim", prompt=[n, n + 1], max_tokens=tokens, temperature=0)
    return answer.choices[0].text


def test_64_at_once(server: Any) -> None:
    async def main() -> None:
        async with client(server) as sdk:
            alone = [await whole(sdk, n, 20) for n in range(64)]
            jobs = [(streamed if n % 2 else whole)(sdk, n, 20) for n in range(64)]
            assert await asyncio.gather(*jobs) == alone

    asyncio.run(main())


def test_half_of_64_leave_and_all_pages_return(server: Any) -> None:
    before = server.idle()

    async def main() -> None:
        async with client(server) as sdk:
            alone = {n: await whole(sdk, n, 30) for n in range(0, 64, 2)}
            jobs = [streamed(sdk, n, 4000, leave_after=3) if n % 2 else streamed(sdk, n, 30) for n in range(64)]
            ends = await asyncio.gather(*jobs)
            assert {n: ends[n] for n in range(0, 64, 2)} == alone

    asyncio.run(main())
    after = server.idle()
    aborted = 'engine_requests_ended_total{reason="abort"}'
    assert after[aborted] - before[aborted] == 32
    assert after["engine_kv_pages_pinned"] == 0
    assert after["engine_kv_pages_free"] + after["engine_kv_pages_evictable"] == after["engine_kv_pages"]


def test_errors_are_the_clients_own_classes(server: Any) -> None:
    async def main() -> None:
        async with client(server) as sdk:
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await sdk.completions.create(model="sim", prompt="x", temperature=-1)
            with pytest.raises(openai.NotFoundError, match="gpt-4"):
                await sdk.completions.create(model="gpt-4", prompt="x")
            models = [model.id async for model in sdk.models.list()]
            assert models == ["sim"]

    asyncio.run(main())


def test_an_error_in_the_middle_of_a_stream_is_raised(start: Any) -> None:
    server = start("--executor", "faulty_executor:FaultyExecutor")

    async def main() -> None:
        async with client(server) as sdk:
            stream = await sdk.completions.create(model="sim", prompt=[40_003], stream=True)
            with pytest.raises(openai.APIError, match="this row is bad"):
                async for _ in stream:
                    pass

    asyncio.run(main())
