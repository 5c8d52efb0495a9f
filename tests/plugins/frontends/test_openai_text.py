"""Text that is cut anywhere, over HTTP: stop strings, characters of several tokens, impossible tokens; streamed or not,
one choice or more (cases B31, B32, B35). The model says its prompt again, so each test chooses what it says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.model  # its tokenizer

EOS, IMPOSSIBLE = 2, -9999.0


@pytest.fixture(scope="module")
def echo(share: Callable[..., Any]) -> Iterator[Any]:
    with share("--executor", "faulty_executor:EchoExecutor", "--executor.eos-id", str(EOS)) as server:
        yield server


def both(server: Any, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The choices, which are the same streamed or not, piece by piece: text, reason, log-probabilities."""
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    events = [event["choices"][0] for event in server.events(path, body)]
    for choice in choices:
        mine = [event for event in events if event["index"] == choice["index"]]
        assert "".join(map(said, mine)) == said(choice)
        assert [event["finish_reason"] for event in mine if event["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1].get("finish_detail") == choice.get("finish_detail")
        assert all("\ufffd" not in said(event)[:-1] for event in mine)  # half a character, and not the last one
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [one for event in mine for one in (event["logprobs"] or {}).get(name) or []] == (values or [])
    return choices


def said(choice: dict[str, Any]) -> str:
    found = choice.get("text") if "text" in choice else choice.get("message", choice.get("delta", {})).get("content")
    return found or ""


STOPS = [
    # what is said, what it is stopped by, what is left, and by which; EOS is said after it
    ("one two END three", ["END"], "one two ", "END"),
    ("one two three four five", ["wo three f"], "one t", "wo three f"),  # over several tokens
    ("ab ax abc tail", ["abc"], "ab ax ", "abc"),  # false starts
    ("xabcd", ["abcd", "bc"], "xa", "bc"),  # one within the other: the first that is complete
    ("xabcd", ["bcd", "abcd"], "x", "abcd"),  # complete at once: the longest
    ("the very last END", ["END"], "the very last ", "END"),
    ("END of it", ["END"], "", "END"),  # the very first
    ("withheld EN", ["END"], "withheld EN", str(EOS)),  # harmless after all
    ("aaab", ["aab"], "a", "aab"),
    ("Grüße 😀!", ["😀"], "Grüße ", "😀"),
    ("a 😀", ["😀x", "x😀"], "a 😀", str(EOS)),  # half of it is all that comes
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("text", "stop", "left", "by"), STOPS)
def test_stop_strings(echo: Any, tokenizer: Any, text: str, stop: list[str], left: str, by: str, include: bool) -> None:
    ids = [*tokenizer.encode(text), EOS]
    body = {"prompt": ids, "max_tokens": 3 * len(ids), "stop": stop, "include_stop_str_in_output": include, "n": 2,
            "logprobs": 0}  # fmt: skip
    shown = left + by if include and by in stop else left
    for choice in both(echo, body):
        assert (choice["text"], choice["finish_reason"], choice["finish_detail"]) == (shown, "stop", by)


@pytest.mark.parametrize(("least", "left"), [(0, "a"), (2, "a"), (3, "a b a"), (5, "a b a b a")])
def test_min_tokens_goes_before_stop(echo: Any, tokenizer: Any, least: int, left: str) -> None:
    ids = tokenizer.encode("a b a b a b")
    [choice] = both(echo, {"prompt": ids, "max_tokens": 12, "stop": " b", "min_tokens": least})
    assert (choice["text"], choice["finish_detail"]) == (left, " b")
    ends = [*tokenizer.encode("a"), EOS, *tokenizer.encode(" b"), EOS]  # a token that ends it: the same
    [choice] = both(echo, {"prompt": ends, "max_tokens": 12, "min_tokens": least})
    assert choice["text"] == ("a" if least <= 2 else "a b" if least <= 4 else "a ba")


def test_stop_strings_of_a_conversation(echo: Any) -> None:
    """The conversation is said again: marks are not shown, and a stop may be over where one is."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "say tomato"}], "max_tokens": 200, "n": 2}
    [whole, _] = both(echo, {**body, "max_tokens": 30, "ignore_eos": True}, "/v1/chat/completions")
    assert "user\nsay tomato" in said(whole)
    for choice in both(echo, {**body, "ignore_eos": True, "stop": ["y tom", "nonsense"]}, "/v1/chat/completions"):
        assert said(choice).endswith("user\nsa")
        assert (choice["finish_reason"], choice["finish_detail"]) == ("stop", "y tom")


def halves(tokenizer: Any) -> dict[int, int]:
    """Byte -> the token that is this byte alone."""
    return {data[0]: token for token in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(token)) == 1}


TEXTS = ["😀", "a😀b", "👩‍👩‍👧‍👦 family", "é e\u0301 ñ", "日本語", "नमस्ते", "\u202eabc\u202c", "x\u0000y"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_characters_in_bytes(echo: Any, tokenizer: Any, text: str) -> None:
    """Each byte a token: no mark anywhere, and log-probabilities know the bytes."""
    single = halves(tokenizer)
    ids = [single[byte] for byte in text.encode()]
    body = {"prompt": ids, "max_tokens": len(ids), "n": 2, "logprobs": 1}
    for choice in both(echo, body):
        assert choice["text"] == text
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert b"".join(map(named, choice["logprobs"]["tokens"])) == text.encode()
    streamed = [event["choices"][0]["text"] for event in echo.events("/v1/completions", body)]
    assert not any("\ufffd" in piece for piece in streamed)


def named(token: str) -> bytes:
    """The bytes that a token's name stands for."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(two, 16) for two in token.removeprefix("bytes:").split("\\x")[1:])


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_that_is_cut_is_one_mark_at_the_end(echo: Any, tokenizer: Any, kept: int) -> None:
    single = halves(tokenizer)
    ids = [single[byte] for byte in "a😀".encode()]
    body = {"prompt": ids, "max_tokens": 1 + kept}
    [choice] = both(echo, body)
    assert (choice["text"], choice["finish_reason"]) == ("a\ufffd", "length")
    pieces = [event["choices"][0]["text"] for event in echo.events("/v1/completions", body)]
    assert [piece.count("\ufffd") for piece in pieces] == [*[0] * (len(pieces) - 1), 1]


def test_bytes_in_any_order(echo: Any, tokenizer: Any) -> None:
    """Halves of characters, whole words, blanks and marks mixed: the decoded whole, and every neighbour its own."""
    single, chance = halves(tokenizer), random.Random(0)
    words = tokenizer.encode(" the quick 😀 brown")
    parts = [token for byte, token in single.items() if byte > 127]
    prompts = [[single[0x80]], [single[0xF0], single[0x9F], words[0], single[0x98], single[0x80]]]
    prompts += [[chance.choice([chance.choice(parts), chance.choice(words), 1]) for _ in range(30)] for _ in range(30)]
    body = {"prompt": prompts, "max_tokens": 30, "logprobs": 0}
    for choice, ids in zip(both_loosely(echo, body), prompts, strict=True):
        out = (ids * 30)[:30]
        assert choice["text"] == tokenizer.decode(out, True)
        assert [named(name) for name in choice["logprobs"]["tokens"]] == [tokenizer.token_bytes(one) for one in out]
    assert echo.http.get("/health").status_code == 200


def both_loosely(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """As ``both``, where marks may be anywhere."""
    choices: list[dict[str, Any]] = server.http.post("/v1/completions", json=body).json()["choices"]
    joined = ["" for _ in choices]
    for event in server.events("/v1/completions", body):
        joined[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert joined == [choice["text"] for choice in choices]
    return choices


@pytest.mark.parametrize("more", [{}, {"top_k": 1}, {"temperature": 0.01}, {"echo": True, "top_k": 1}], ids=str)
def test_what_is_impossible_has_a_number(echo: Any, tokenizer: Any, more: dict[str, Any]) -> None:
    """A token of probability nought, sampled or a rival, is valid JSON at the floor, in both formats."""
    ids = tokenizer.encode("one two three")
    [choice] = both(echo, {"prompt": ids, "max_tokens": 3, "logprobs": 5, **more})
    found = choice["logprobs"]
    assert {0.0, IMPOSSIBLE} <= set(found["token_logprobs"]) <= {0.0, IMPOSSIBLE, None}
    for token, own, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert own is None or top[token] == own
        assert top is None or len(top) >= 5
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "logprobs": True, "top_logprobs": 5}
    [talk] = both(echo, {**body, **{name: value for name, value in more.items() if name != "echo"}},
                  "/v1/chat/completions")  # fmt: skip
    content = talk["logprobs"]["content"]
    assert {0.0, IMPOSSIBLE} <= {entry["logprob"] for entry in content}
    assert {len(entry["top_logprobs"]) for entry in content} == {5}
    raw = echo.http.post("/v1/completions", json={"prompt": ids, "max_tokens": 3, "logprobs": 5, "stream": True}).text
    assert "Infinity" not in raw
    assert all(json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {"))
