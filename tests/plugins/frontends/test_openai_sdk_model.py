"""The official client, unmodified, against the default model: texts, vectors, schemas, tools, and the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = pytest.mark.model

GRAMMARS = find_spec("llguidance") is not None

MODEL = "SmolLM2-135M-Instruct"


class City(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome", "Bern"]
    large: bool
    population: int | None


SCHEMA = City.model_json_schema()
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def client(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def model_server(share: Callable[..., Any]) -> Iterator[Any]:
    """One for all of them, for loading a model takes a while."""
    flags = ("--grammar.whitespace", "2") if GRAMMARS else ()
    with share("--num-pages", "512", "--overlap", "true", *flags) as server:
        yield server


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


def test_default_model_knows_what_is_alike(model_server: Any) -> None:
    """By either way of pooling; the client asks for base64 and makes numbers of it."""
    texts = ["My cat sleeps all day.", "Kittens and felines love long naps.", "The stock market fell sharply today."]

    async def main() -> None:
        async with client(model_server) as sdk:
            for pooling in ("last", "mean"):
                answer = await sdk.embeddings.create(model=MODEL, input=texts, extra_body={"pooling": pooling})
                cat, kitten, market = (item.embedding for item in answer.data)
                assert len(cat) == 576
                alike, other = (sum(a * b for a, b in zip(cat, one, strict=True)) for one in (kitten, market))
                assert 1 > alike > other
                assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15

    asyncio.run(main())


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


@pytest.mark.skipif(not GRAMMARS, reason="needs pip install 'sixhooks[grammar]'")
def test_schemas_tools_and_responses(model_server: Any) -> None:
    """Several requests at once, for they share a batch."""

    async def main() -> None:
        async with client(model_server) as sdk:
            await asyncio.gather(parsed(sdk), tools(sdk), responses(sdk), refused(sdk))

    asyncio.run(main())


async def parsed(sdk: openai.AsyncOpenAI) -> None:
    """``parse`` with a pydantic model: whatever the model's temperature, it validates; log-probabilities beside it."""
    messages: Any = [{"role": "user", "content": "Name a city as JSON."}]
    for seed in (1,):
        answer = await sdk.chat.completions.parse(
            model=MODEL,
            messages=messages,
            response_format=City,
            temperature=1,
            seed=seed,
            max_tokens=120,
            logprobs=True,
        )
        [choice] = answer.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, City)
        assert choice.logprobs is not None
        assert choice.logprobs.content
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=messages, temperature=1, seed=seed, max_tokens=120, stream=True,
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        )  # fmt: skip
        text = "".join([event.choices[0].delta.content or "" async for event in stream])
        City.model_validate_json(text)


async def tools(sdk: openai.AsyncOpenAI) -> None:
    """A required call, streamed or not; its answer goes back; and the stream helper of the SDK understands it."""
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    wish: Any = {"model": MODEL, "tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 120,
                 "parallel_tool_calls": False}  # fmt: skip
    answer = await sdk.chat.completions.create(messages=messages, **wish)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    async with sdk.chat.completions.stream(messages=messages, **wish) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    back = [*messages, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}]
    told = await sdk.chat.completions.create(model=MODEL, messages=back, tools=[WEATHER], max_tokens=8, temperature=0)
    assert told.choices[0].message.content or told.choices[0].message.tool_calls


async def responses(sdk: openai.AsyncOpenAI) -> None:
    """Text, streamed or not, with the SDK's own accumulation; a parsed schema; a function."""
    question = "What is the capital of France? Answer in one word."
    answer = await sdk.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=12)
    assert answer.status in ("completed", "incomplete")
    assert "Paris" in answer.output_text
    async with sdk.responses.stream(model=MODEL, input=question, temperature=0, max_output_tokens=12) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response() if answer.status == "completed" else None
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{answer.status}"
    assert final is None or final.output_text == answer.output_text
    formed = await sdk.responses.parse(
        model=MODEL, input="Name a city.", text_format=City, temperature=0, max_output_tokens=120
    )
    assert isinstance(formed.output_parsed, City)
    tool: Any = {"type": "function", **WEATHER["function"]}
    called = await sdk.responses.create(
        model=MODEL,
        input="Weather in Rome?",
        tools=[tool],
        tool_choice="required",
        temperature=0,
        max_output_tokens=120,
    )
    calls = [item for item in called.output if item.type == "function_call"]
    assert calls
    assert json.loads(calls[0].arguments)["city"] in ("Paris", "Rome")


async def refused(sdk: openai.AsyncOpenAI) -> None:
    """A bad schema is the client's fault, streamed or not, and so are things that are not kept here."""
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "str"}}}
    messages: Any = [{"role": "user", "content": "hi"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Invalid type: str") as caught:
            await sdk.chat.completions.create(model=MODEL, messages=messages, response_format=bad, stream=stream)
        assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="store"):
        await sdk.responses.create(model=MODEL, input="hi", store=True)
