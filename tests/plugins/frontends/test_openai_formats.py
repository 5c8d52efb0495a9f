"""``response_format`` and vLLM's ``structured_outputs`` over HTTP: no model here, but a real vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.model,  # its tokenizer
    pytest.mark.skipif(not find_spec("llguidance"), reason="needs pip install 'sixhooks[grammar]'"),
]

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "grün"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def guided(share: Callable[..., Any]) -> Iterator[Any]:
    """Ends with the model's own end-of-sequence token, and says blanks rarely."""
    flags = ("--executor", "sim", "--executor.eos-id", "2", "--grammar.whitespace", "1", "--audit", "true")
    with share(*flags) as server:
        yield server


def chat(server: Any, **more: Any) -> Any:
    answer = server.http.post("/v1/chat/completions", json={**CHAT, **more})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice


def right(text: str) -> bool:
    found = json.loads(text)
    return found["colour"] in ("red", "grün") and 0 <= found["count"] <= 99 and len(found) == 2


def test_json_by_a_schema_streamed_or_not(guided: Any) -> None:
    choice = chat(guided, response_format=NAMED)
    assert right(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    events = guided.events("/v1/chat/completions", {**CHAT, "response_format": NAMED})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("outputs", "check"),
    [
        ({"json": SCHEMA}, right),
        ({"json": json.dumps(SCHEMA)}, right),
        ({"regex": r"[a-f]{3}-\d{2}"}, lambda text: re.fullmatch(r"[a-f]{3}-\d{2}", text)),
        ({"choice": ["yes", "no way"]}, lambda text: text in ("yes", "no way")),
        ({"grammar": 'start: "<" /[a-z]{2,4}/ ">"'}, lambda text: re.fullmatch("<[a-z]{2,4}>", text)),
        ({"json_object": False, "choice": ["x"], "disable_any_whitespace": False}, lambda text: text == "x"),
    ],
)
def test_by_the_names_of_vllm_in_both_endpoints(guided: Any, outputs: Any, check: Callable[[str], Any]) -> None:
    assert check(chat(guided, structured_outputs=outputs)["message"]["content"])
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 200, "structured_outputs": outputs}
    choices = guided.http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    assert all(check(choice["text"]) for choice in choices)


def test_an_answer_that_is_cut_says_so(guided: Any) -> None:
    choice = chat(guided, response_format={"type": "json_object"}, max_tokens=2)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wish", "param", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "str"}}}},
         "response_format", "Invalid type: str"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {"type": "json_object", "json_schema": NAMED["json_schema"]}},
         "response_format.json_schema", "does not go with"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "more": 1}}},
         "response_format.json_schema.more", "unknown field"),
        ({"response_format": NAMED, "structured_outputs": {"choice": ["x"]}}, "structured_outputs", "give one"),
        ({"structured_outputs": {}}, "structured_outputs", "0 were given"),
        ({"structured_outputs": {"choice": ["x"], "regex": "x"}}, "structured_outputs", "2 were given"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "(x"}}, "structured_outputs.regex", "cannot be compiled"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "cannot be compiled"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one text"),
        ({"structured_outputs": {"regex": "x" * 70_000}}, "structured_outputs.regex", "at most 65536"),
        ({"structured_outputs": {"choice": ["x"]}, "min_tokens": 2}, "min_tokens", "cannot be promised"),
        ({"guided_json": SCHEMA}, "guided_json", "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_at_its_field(
    guided: Any, wish: Any, param: str, words: str, stream: bool
) -> None:
    answer = guided.http.post("/v1/chat/completions", json={**CHAT, **wish, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
