"""The official client against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"


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


# ---- the default model


@pytest.fixture(scope="module")
def model_server(share: Callable[..., Any]) -> Iterator[Any]:
    with share("--num-pages", "512") as server:
        yield server


@pytest.mark.model
def test_default_model_answers(model_server: Any) -> None:
    async def main() -> None:
        async with client(model_server) as sdk:
            messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
            answer = await sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
            text = answer.choices[0].message.content or ""
            assert "Paris" in text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > 10
            pieces = []
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True
            )
            async for event in stream:
                pieces.append(event.choices[0].delta.content or "")
            assert "".join(pieces) == text

    asyncio.run(main())


@pytest.mark.model
def test_default_model_batch_equals_alone(model_server: Any) -> None:
    prompts = ["The sky is", "def add(a, b):", "Hello, my name is"]

    async def main() -> None:
        async with client(model_server) as sdk:

            async def ask(prompt: Any) -> list[str]:
                answer = await sdk.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)
                return [choice.text for choice in answer.choices]

            together = await ask(prompts)
            assert together == [(await ask(prompt))[0] for prompt in prompts]
            assert all(together)

    asyncio.run(main())


@pytest.mark.model
def test_default_model_log_probabilities(model_server: Any) -> None:
    """The official client reads them, in both formats, streamed or not."""

    async def main() -> None:
        async with client(model_server) as sdk:
            wish: Any = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
            answer = await sdk.completions.create(**wish, logprobs=3, echo=True)
            found = answer.choices[0].logprobs
            assert found is not None
            assert found.tokens is not None
            assert "".join(found.tokens) == answer.choices[0].text
            assert answer.choices[0].text.startswith(wish["prompt"] + " Paris")
            assert found.token_logprobs is not None
            assert found.token_logprobs[0] is None
            assert all(value <= 0 for value in found.token_logprobs[1:])
            best = [max(top, key=top.__getitem__) for top in (found.top_logprobs or [])[-5:]]
            assert best == found.tokens[-5:]  # greedy
            pieces = [event async for event in await sdk.completions.create(**wish, logprobs=3, echo=True, stream=True)]
            streamed = [one for event in pieces for one in event.choices[0].logprobs.token_logprobs]  # type: ignore[union-attr]
            assert streamed == found.token_logprobs

            sharp = await sdk.completions.create(**{**wish, "temperature": 0.01}, logprobs=5, extra_body={"top_k": 1})
            assert sharp.choices[0].logprobs.token_logprobs == found.token_logprobs[-5:]  # type: ignore[union-attr]

            messages: Any = [{"role": "user", "content": "Say hi."}]
            talk: Any = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}
            chat = await sdk.chat.completions.create(**talk, logprobs=True, top_logprobs=2)
            content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
            assert content is not None
            assert (
                bytes(byte for one in content for byte in one.bytes or []).decode() == chat.choices[0].message.content
            )
            assert all(one.top_logprobs[0].token == one.token for one in content)
            biased = await sdk.chat.completions.create(**talk, logit_bias={"2": 100})
            assert (biased.choices[0].message.content, biased.choices[0].finish_reason) == ("", "stop")
            punished = await sdk.chat.completions.create(**talk, frequency_penalty=2, presence_penalty=2, seed=1, n=2)
            assert len(punished.choices) == 2

    asyncio.run(main())


@pytest.mark.model
def test_default_model_seeds_are_kept_in_company(model_server: Any) -> None:
    async def main() -> None:
        async with client(model_server) as sdk:

            async def ask(seed: int) -> list[str]:
                answer = await sdk.completions.create(
                    model=MODEL, prompt="Once", max_tokens=6, temperature=1, top_p=0.9, seed=seed, n=2
                )
                return [choice.text for choice in answer.choices]

            alone = [await ask(seed) for seed in range(3)]
            assert await asyncio.gather(*[ask(seed) for seed in range(3)]) == alone
            assert len({text for texts in alone for text in texts}) > 1

    asyncio.run(main())
