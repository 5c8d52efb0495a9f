"""A body is read field by field: what is too much is refused there, before anything is built of it (case B51)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from app_kit import post, refused
from hypothesis import given
from hypothesis import strategies as st

from engine import AsyncEngine, EngineConfig, InvalidRequest
from engine.core.checks import MAX_METADATA
from engine.core.grammar import Grammar
from engine.plugins.frontends import _piecemeal
from engine.plugins.frontends._openai_fields import FEW, LONGEST_NAME
from engine.plugins.frontends._openai_schema import CompletionRequest
from engine.plugins.frontends._piecemeal import UnknownField, fields_of, value_of
from engine.plugins.frontends.openai import OpenAIFrontend

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2}
TURN = {"role": "user", "content": "hi"}
LIMITS = {
    "executor": "sim", "max_running": 4, "max_waiting": 5, "max_waiting_tokens": 40_000, "max_stop_strings": 3,
    "max_stop_token_ids": 4, "max_logit_bias": 5, "max_grammar_bytes": 100,
}  # fmt: skip
RENDER, CHAT = "/v1/completions/render", "/v1/chat/completions/render"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    engine = AsyncEngine.launch(EngineConfig.model_validate(LIMITS), in_process=True)
    yield OpenAIFrontend().app(engine)
    engine.shutdown()


@pytest.mark.parametrize(
    ("field", "most", "one", "words"),
    [
        ("stop", 3, "x", "has 4 elements, at most 3 are allowed (max_stop_strings)"),
        ("stop_token_ids", 4, 7, "has 5 elements, at most 4 are allowed (max_stop_token_ids)"),
        ("prompt", 9, "x", "10 prompts x n 1: at most 9 sequences can be open"),
        ("prompt", 9, [1], "10 prompts x n 1: at most 9 sequences can be open"),
    ],
)
def test_a_list_as_long_as_it_may_be_and_one_longer(app: Any, field: str, most: int, one: Any, words: str) -> None:
    assert post(app, RENDER, {**GOOD, field: [one] * most}).status_code == 200
    assert words in refused(app, RENDER, {**GOOD, field: [one] * (most + 1)}, field)


def test_an_object_as_large_as_it_may_be_and_one_larger(app: Any) -> None:
    bias = {str(number): 1 for number in range(6)}
    words = refused(app, RENDER, {**GOOD, "logit_bias": bias}, "logit_bias")
    assert "has 6 elements, at most 5 are allowed (max_logit_bias)" in words
    del bias["0"]
    assert post(app, RENDER, {**GOOD, "logit_bias": bias}).status_code == 200


def test_metadata_as_large_as_it_may_be_and_larger(app: Any) -> None:
    """Names of one character and no text: as many as there can be."""
    names = [chr(0x4E00 + number) for number in range(MAX_METADATA // 2)]
    most = {**dict.fromkeys(names[1:], ""), "": ""}
    answer = post(app, RENDER, {**GOOD, "metadata": most})
    assert answer.status_code == 200, answer.text
    assert "values and characters" in refused(app, RENDER, {**GOOD, "metadata": {**most, "": "a"}}, "metadata")
    assert "elements" in refused(app, RENDER, {**GOOD, "metadata": {**most, "b": ""}}, "metadata")
    assert "bytes of text" in refused(app, RENDER, {**GOOD, "metadata": {"a": "b" * 800_000}}, "metadata")


@pytest.mark.parametrize(("path", "field"), [(RENDER, "prompt"), ("/v1/embeddings", "input")])
def test_token_ids_as_many_as_may_wait_and_one_more(app: Any, path: str, field: str) -> None:
    prompt = [[1] * 8000] * 5
    assert post(app, path, {field: prompt}).status_code == 200
    words = refused(app, path, {field: [*prompt, [1]]}, field)
    assert "has 40001 elements, at most 40000 are allowed" in words


def test_texts_of_embeddings_as_many_as_can_be_open_and_one_more(app: Any) -> None:
    assert post(app, "/v1/embeddings", {"input": ["x"] * 9}).status_code == 200
    assert "has 10 texts: at most 9" in refused(app, "/v1/embeddings", {"input": ["x"] * 10}, "input")
    assert "has 18 texts: at most 9" in refused(app, "/v1/embeddings", {"input": ["x"] * 18}, "input")
    for many, words in ((["x"] * 37, "37 strings, at most 36"), ([[1]] * 36, "37 lists and objects, at most 36")):
        assert words in refused(app, "/v1/embeddings", {"input": many}, "input")
        assert words in refused(app, RENDER, {"prompt": many}, "prompt")
    turns = [{"type": "message", **TURN}] * 40  # where it is a conversation it may hold more
    assert post(app, "/v1/responses", {"input": turns, "max_output_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "around"),
    [
        ("/v1/chat/completions", "response_format",
         lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
        ("/v1/chat/completions", "structured_outputs", lambda schema: {"json": schema}),
        ("/v1/responses", "text", lambda schema: {"format": {"type": "json_schema", "schema": schema}}),
    ],
)  # fmt: skip
def test_a_schema_as_large_as_it_may_be_and_larger(app: Any, path: str, field: str, around: Any) -> None:
    asked = {"input": "hi"} if "responses" in path else {"messages": [TURN]}
    for schema, words in (
        ({"enum": [1] * 200}, "elements, at most 164 are allowed (max_grammar_bytes)"),
        ({"const": "x" * 1600}, "bytes of text, at most 1568 are allowed (max_grammar_bytes)"),
    ):
        assert words in refused(app, path, {**asked, field: around(schema)}, field)
    for schema in ({"enum": [1] * 30}, {"const": "x" * 80}):
        fits = post(app, path, {**asked, field: around(schema)}).json()
        assert "no grammar could ever end" in fits["error"]["message"]  # it came as far as to the engine


def test_tools_as_many_as_there_may_be_and_one_more(app: Any) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(129)]
    assert post(app, CHAT, {"messages": [TURN], "tools": tools[1:]}).status_code == 200
    assert "at most 128" in refused(app, CHAT, {"messages": [TURN], "tools": tools}, "tools")


def test_what_is_no_list_may_not_be_a_long_one(app: Any) -> None:
    assert FEW.elements is not None
    for field in ("temperature", "user", "functions"):
        words = refused(app, RENDER, {**GOOD, field: [1] * (FEW.elements + 1)}, field)
        assert f"at most {FEW.elements} are allowed" in words
        code = "unsupported" if field == "functions" else "invalid_value"
        refused(app, RENDER, {**GOOD, field: [1] * FEW.elements}, field, code)


def test_a_field_that_nobody_knows_is_told_by_its_name(app: Any) -> None:
    for name in ("tempreature", "a`b", "x" * 200, "", "\u00e9\n"):
        refused(app, RENDER, {**GOOD, name: 1}, name if len(name) < 80 else name[: LONGEST_NAME - 3] + "...",
                "unknown_field")  # fmt: skip
    assert "did you mean 'temperature'" in refused(
        app, RENDER, {"tempreature": 1, **GOOD}, "tempreature", "unknown_field"
    )


def test_null_is_told_from_nothing(app: Any) -> None:
    assert post(app, RENDER, {**GOOD, "stop": None, "functions": None}).status_code == 200
    assert "got None" in refused(app, CHAT, {"messages": None}, "messages", "invalid_value")
    assert "is required" in refused(app, CHAT, {}, "messages", "missing")


def test_of_two_fields_of_one_name_the_last_one_counts() -> None:
    assert fields_of(b'{"a": 1, "b": [2], "a": {"c": 3}}', ["a", "b"]) == {"a": b'{"c": 3}', "b": b"[2]"}
    with pytest.raises(UnknownField) as caught:
        fields_of(b'{"a": 1, "c": 2', ["a"])
    assert caught.value.name == "c"


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"null", "not null"), (b"[{}]", "not a list"), (b'"{}"', "not a string"), (b"true", "not a boolean"),
     (b"1.5", "not a number"), (b"{", "not valid JSON"), (b" ", "is empty")],
)  # fmt: skip
def test_what_is_no_object(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        fields_of(body, ["a"])
    assert caught.value.field == "body"


@given(VALUES, st.integers(1, 12), st.sampled_from([None, 1]))
def test_what_is_built_in_pieces_is_the_same(value: Any, piece: int, indent: int | None) -> None:
    before, _piecemeal.PIECE = _piecemeal.PIECE, piece
    try:
        assert value_of(json.dumps(value, indent=indent).encode()) == value
    finally:
        _piecemeal.PIECE = before


def test_a_long_list_is_built_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of long lists; nothing else can run in this process while a piece is built."""
    longest = 0

    class Decoder:
        def decode(self, text: bytes) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return json.loads(text)

    monkeypatch.setattr(_piecemeal, "WHOLE", Decoder())
    wish = CompletionRequest.parse(json.dumps({"prompt": [[1000] * 200_000, [7] * 5]}).encode())
    assert wish.prompt == [[1000] * 200_000, [7] * 5]
    assert longest < 2 * _piecemeal.PIECE


def test_a_number_without_a_fraction_is_an_integer(app: Any) -> None:
    """As JSON Schema has it. A schema of the client's is left as it is."""
    body = b'{"prompt": [[1.0, 2e0], [3]], "max_tokens": 2.0, "stop_token_ids": [5.0], "temperature": 1.0, "n": 1E0}'
    answer = post(app, RENDER, body)
    assert answer.status_code == 200, answer.text
    assert [one["prompt_token_ids"] for one in answer.json()["data"]] == [[1, 2], [3]]
    assert answer.json()["data"][0]["max_tokens"] == 2
    assert post(app, "/v1/embeddings", b'{"input": [1.0, 2]}').status_code == 200
    assert post(app, "/detokenize", b'{"tokens": [1.0]}').status_code == 200
    for wrong in (b"1.5", b"1e300", b"-0.5", b"true"):
        refused(app, RENDER, b'{"prompt": [1], "max_tokens": %s}' % wrong, "max_tokens", "invalid_value")
    assert "not valid JSON" in refused(app, RENDER, b'{"prompt": [1], "max_tokens": 1e999}', "body", "invalid_value")
    for number in (b"1", b"1.0"):
        text = b'{"prompt": [1], "structured_outputs": {"json": {"const": %s}}}' % number
        wish = CompletionRequest.parse(text).structured_outputs
        assert wish is not None
        assert json.dumps(wish.json_).encode() == b'{"const": %s}' % number


def test_what_is_wrong_is_shown_in_part(app: Any) -> None:
    body = {"messages": [{"role": "user", "content": {"x" * 500: [["y" * 500] * 90] * 90}}]}
    words = refused(app, CHAT, body, "messages[0].content", "invalid_value")
    assert words.endswith("...")
    assert "xxx" in words


def test_grammar_of_empty_lines_is_looked_at_once() -> None:
    """It took hours, from each line over all those after it, with the interpreter's lock held."""
    assert Grammar.rules("\n" * 2_000_000).kind == "lark"
    assert Grammar.rules("\n" * 1000 + " \t root ::= x").kind == "ebnf"
