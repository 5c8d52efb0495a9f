"""Tool calls over HTTP: required ones are made by the grammar, so that a model without a mind makes them, too."""

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

CITY = {"enum": ["Bern", "Köln"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": CITY},
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, PING], "max_tokens": 400,
}  # fmt: skip


@pytest.fixture(scope="module", params=["hermes", "pythonic"])
def tooled(share: Callable[..., Any], request: Any) -> Iterator[Any]:
    flags = ("--executor", "sim", "--executor.eos-id", "2", "--tool-parser", request.param, "--audit", "true")
    with share(*flags) as server:
        server.parser = request.param
        yield server


def chat(server: Any, **more: Any) -> Any:
    answer = server.http.post("/v1/chat/completions", json={**CHAT, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def fits(call: Any) -> bool:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "ping":
        return bool(arguments == {})
    return arguments["city"] in CITY["enum"] and arguments.get("days", 1) in range(1, 10)


def test_required_calls_are_made_whole_or_in_pieces(tooled: Any) -> None:
    for seed in range(3):
        wish = {"tool_choice": "required", "seed": seed, "n": 2, "parallel_tool_calls": seed != 2}
        whole = chat(tooled, **wish)["choices"]
        events = tooled.events("/v1/chat/completions", {**CHAT, **wish})
        for choice in whole:
            message = choice["message"]
            assert choice["finish_reason"] == "tool_calls"
            assert message["content"] is None
            assert all(map(fits, message["tool_calls"]))
            assert seed != 2 or len(message["tool_calls"]) == 1
            mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            assert mine[-1]["finish_reason"] == "tool_calls"
            joined: list[Any] = []
            for delta in (one for part in mine for one in part["delta"].get("tool_calls", [])):
                if "id" in delta:
                    assert (delta["index"], delta["type"]) == (len(joined), "function")
                    joined.append(dict(delta["function"]))
                else:
                    joined[delta["index"]]["arguments"] += delta["function"]["arguments"]
            assert joined == [call["function"] for call in message["tool_calls"]]
            assert not any(part["delta"].get("content") for part in mine)


def test_the_named_one_is_called(tooled: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    [choice] = chat(tooled, tool_choice=named)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert fits(call)
    assert call["id"].startswith("call_")
    assert choice["finish_reason"] == "stop"  # as OpenAI says it


def test_a_call_that_is_cut_says_so(tooled: Any) -> None:
    [choice] = chat(tooled, tool_choice="required", max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length"


def test_without_a_call_the_answer_is_what_it_was(tooled: Any) -> None:
    """Nobody calls a tool by chance; and tools that may not be called are not even told of."""
    [free] = chat(tooled, max_tokens=40)["choices"]
    assert free["message"]["content"]
    assert "tool_calls" not in free["message"]
    assert free["finish_reason"] == "length"
    [none] = chat(tooled, tool_choice="none", max_tokens=5)["choices"]
    plain = {key: value for key, value in CHAT.items() if key != "tools"}
    answer = tooled.http.post("/v1/chat/completions", json={**plain, "max_tokens": 5}).json()
    assert answer["choices"][0]["message"]["content"] == none["message"]["content"]
    assert answer["usage"]["prompt_tokens"] < chat(tooled, max_tokens=1)["usage"]["prompt_tokens"]


def test_the_prompt_tells_of_tools_calls_and_answers(tooled: Any) -> None:
    """Of a template that knows no tools, in the words of the parser; a conversation with all that there may be."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
    ping = {"id": "c2", "type": "function", "function": {"name": "ping", "arguments": ""}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call, ping]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "pong"}]},
        {"role": "assistant", "content": "Sunny.", "tool_calls": []},
        {"role": "user", "content": "Thanks"},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    answer = tooled.http.post("/v1/chat/completions/render", json=body).json()
    prompt = answer["data"][0]["prompt"]
    assert "None" not in prompt
    for part in ("get_weather", "The weather of a city.", "sunny", "pong", "Sunny.", "Thanks"):
        assert part in prompt
    written = {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "pythonic": "[get_weather(city='Bern'), ping()]",
    }
    assert f"<|im_start|>assistant\n{written[tooled.parser]}<|im_end|>" in prompt
    assert prompt.count("<|im_start|>user") == 3  # both answers in one turn
    tokens = tooled.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert 0 < tokens < answer["data"][0]["count"]  # without the tools themselves


@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed when tools are given"),
        ({"tool_choice": "always"}, "tool_choice", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice", "none of the tools"),
        ({"tools": [PING, PING]}, "tools", "same name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "a", "more": 1}}]}, "tools[0].function.more", "unknown"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "required",
          "tools": [{"type": "function", "function": {"name": "a", "parameters": {
              "type": "object", "properties": {"x": {"type": "str"}}}}}]}, "tools", "Invalid type: str"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot be kept to"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "needs tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages", "has no tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}]},
         "messages[0].tool_calls[0].function", "is required"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_refused_at_its_field(tooled: Any, wish: Any, param: str, words: str) -> None:
    answer = tooled.http.post("/v1/chat/completions", json={**CHAT, **wish})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error
