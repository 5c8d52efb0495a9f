"""The official client, unmodified, against the default model: schemas, tools, and the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not find_spec("llguidance"), reason="needs pip install 'sixhooks[grammar]'"),
]

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


@pytest.fixture(scope="module")
def structured(share: Callable[..., Any]) -> Iterator[Any]:
    with share("--num-pages", "512", "--overlap", "true", "--grammar.whitespace", "2") as server:
        yield server


def test_schemas_tools_and_responses(structured: Any) -> None:
    """One server, for loading a model takes a while; several requests at once, for they share its batch."""
    url = f"{structured.url}/v1"

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as sdk:
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
