"""``/v1/responses`` over HTTP: items, events in order, tools and schemas; the official client is in the SDK's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.model,  # its tokenizer
    pytest.mark.skipif(not find_spec("llguidance"), reason="needs pip install 'sixhooks[grammar]'"),
]

PING = {"type": "function", "name": "ping", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"], "additionalProperties": False}}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def responding(share: Callable[..., Any]) -> Iterator[Any]:
    flags = ("--executor", "sim", "--executor.eos-id", "2", "--grammar.whitespace", "1", "--audit", "true")
    with share(*flags) as server:
        yield server


def respond(server: Any, **body: Any) -> Any:
    answer = server.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 100, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(server: Any, **body: Any) -> list[Any]:
    with server.http.stream(
        "POST", "/v1/responses", json={"input": "hi", "max_output_tokens": 100, **body, "stream": True}
    ) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    names, data = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {event['type']}" for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    return data


def plain(response: Any) -> Any:
    """Without what is new each time."""
    drop = ("id", "created_at", "completed_at", "call_id")
    top = {key: value for key, value in response.items() if key not in drop}
    return {**top, "output": [{k: v for k, v in item.items() if k not in drop} for item in response["output"]]}


def test_text_whole_and_in_events(responding: Any) -> None:
    whole = respond(responding, max_output_tokens=12, instructions="Be odd.", metadata={"k": "v"})
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["output_tokens"] == 12
    assert (whole["instructions"], whole["metadata"], whole["store"]) == ("Be odd.", {"k": "v"}, False)
    [item] = whole["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    [part] = item["content"]
    events = events_of(responding, max_output_tokens=12, instructions="Be odd.", metadata={"k": "v"})
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert text == part["text"] == events[-4]["text"]
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    usage = {**events[-1]["response"]["usage"], "input_tokens_details": None}
    assert usage == {**whole["usage"], "input_tokens_details": None}
    assert plain({**events[-1]["response"], "usage": None}) == plain({**whole, "usage": None})


def test_a_schema_and_log_probabilities(responding: Any) -> None:
    wanted = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}}
    whole = respond(responding, text=wanted, include=["message.output_text.logprobs"], top_logprobs=2)
    assert whole["status"] == "completed"
    assert whole["text"] == wanted
    [part] = whole["output"][0]["content"]
    assert json.loads(part["text"])["a"] in ("x", "y")
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode().startswith(part["text"])
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    streamed = events_of(responding, text=wanted, include=["message.output_text.logprobs"], top_logprobs=2)
    logs = [one for event in streamed if event["type"].endswith("text.delta") for one in event["logprobs"]]
    assert logs == part["logprobs"] == streamed[-4]["logprobs"]


def test_calls_are_items_of_their_own(responding: Any) -> None:
    wish = {"tools": [PING], "tool_choice": "required", "seed": 3}
    whole = respond(responding, **wish)
    calls = whole["output"]
    assert calls
    assert all((item["type"], item["name"], item["status"]) == ("function_call", "ping", "completed") for item in calls)
    assert all(json.loads(item["arguments"])["n"] in (1, 2) for item in calls)
    events = events_of(responding, **wish)
    assert plain({**events[-1]["response"], "usage": None}) == plain({**whole, "usage": None})
    dones = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in dones] == [item["arguments"] for item in calls]
    back = [
        {"role": "user", "content": "hi"},
        *calls,
        *({"type": "function_call_output", "call_id": item["call_id"], "output": "pong"} for item in calls),
    ]
    assert respond(responding, input=back, tools=[PING], max_output_tokens=1)["usage"]["input_tokens"] > 20
    named = respond(responding, tools=[PING], tool_choice={"type": "function", "name": "ping"})
    assert len(named["output"]) == 1


def test_an_answer_comes_back_as_it_was(responding: Any) -> None:
    """Items of a response are valid input: the prompt is that of the same conversation in chat."""
    first = respond(responding, max_output_tokens=3)
    again = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *first["output"],
             {"role": "user", "content": "more"}]  # fmt: skip
    text = first["output"][0]["content"][0]["text"]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text},
            {"role": "user", "content": "more"}]  # fmt: skip
    chat = responding.http.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 3}).json()
    response = respond(responding, input=again, max_output_tokens=3)
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"store": True}, "store", "False"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unknown field"),
        ({"background": True}, "background", "False"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]", ""),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]", ""),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed when tools are given"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "above the limit"),
        ({"top_logprobs": 99}, "include", "between 0 and"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is required"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "str"}}}}, "text.format", "str"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "logprobs"),
        ({"stop": "x"}, "stop", "unknown field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_at_its_field(
    responding: Any, wish: Any, param: str, words: str, stream: bool
) -> None:
    answer = responding.http.post("/v1/responses", json={"input": "hi", **wish, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert words in error["message"]
