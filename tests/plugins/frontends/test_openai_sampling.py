"""What clients ask for besides text, over HTTP: log-probabilities in every format, echo, the rendered prompt, what the
cache may keep, and ends by time (cases B31, B32, B33, B35, B38, B40, B42, B51)."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.core.sampling import TokenLogprobs
from engine.plugins.frontends._openai_logprobs import (
    FLOOR,
    Echo,
    Names,
    Offsets,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from engine.plugins.frontends._wire import to_json

GOOD: dict[str, Any] = {"prompt": [500, 501, 502], "max_tokens": 8, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
PATHS = [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)]


def post(server: Any, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()  # type: ignore[no-any-return]


def complete(server: Any, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/completions", {**GOOD, **fields})


def chat(server: Any, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", {**CHAT, **fields})


# ---- log-probabilities


def test_logprobs_of_completions(server: Any) -> None:
    [choice] = complete(server, logprobs=3)["choices"]
    found = choice["logprobs"]
    assert {len(values) for values in found.values()} == {8}
    assert "".join(found["tokens"]) == choice["text"]
    for at, (token, offset) in enumerate(zip(found["tokens"], found["text_offset"], strict=True)):
        assert choice["text"][offset : offset + len(token)] == token
        assert found["top_logprobs"][at][token] == found["token_logprobs"][at] <= 0
        assert 1 <= len(found["top_logprobs"][at]) <= 4
    [alone] = complete(server, logprobs=0)["choices"]
    assert [list(top) for top in alone["logprobs"]["top_logprobs"]] == [[token] for token in found["tokens"]]


def test_logprobs_of_chat(server: Any) -> None:
    [choice] = chat(server, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    [plain] = chat(server, logprobs=True)["choices"]
    assert all(entry["top_logprobs"] == [] for entry in plain["logprobs"]["content"])
    assert chat(server)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_joined_is_the_whole_answer(server: Any, n: int, echo: bool) -> None:
    body = {**GOOD, "max_tokens": 30, "n": n, "seed": 3, "temperature": 1, "logprobs": 2, "echo": echo,
            "prompt": ["hello", "once upon a time"]}  # fmt: skip
    whole = post(server, "/v1/completions", body)
    parts = [event["choices"][0] for event in server.events("/v1/completions", body)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * n))
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in mine for value in part["logprobs"][name]] == values
        if echo:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["text_offset"][0] == 0
            named = choice["logprobs"]["tokens"]
            assert all(token in choice["text"] for token in named if not token.startswith("bytes:"))


def test_chat_streams_log_probabilities(server: Any) -> None:
    wish = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 20}
    [choice] = post(server, "/v1/chat/completions", wish)["choices"]
    parts = [event["choices"][0]["logprobs"] for event in server.events("/v1/chat/completions", wish)]
    assert [entry for part in parts if part for entry in part["content"]] == choice["logprobs"]["content"]


def test_echo_gives_the_prompt_back(server: Any) -> None:
    [choice] = complete(server, prompt="hello there", echo=True)["choices"]
    [plain] = complete(server, prompt="hello there")["choices"]
    assert choice["text"] == "hello there" + plain["text"]
    assert choice["logprobs"] is None
    body = complete(server, prompt="hello there", echo=True, logprobs=1, max_tokens=0)  # to look at a text only
    [scored] = body["choices"]
    assert scored["text"] == "hello there"
    assert body["usage"]["completion_tokens"] == 0
    assert len(scored["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert scored["logprobs"]["token_logprobs"][1] < 0


def test_prompt_logprobs_are_vllms(server: Any) -> None:
    prompt = list(range(600, 640))
    complete(server, prompt=prompt)
    body = complete(server, prompt=prompt, prompt_logprobs=1)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the cache has no logits
    found = body["choices"][0]["prompt_logprobs"]
    assert len(found) == 40
    assert found[0] is None
    for token, entries in zip(prompt[1:], found[1:], strict=True):
        assert set(entries[str(token)]) == {"logprob", "rank", "decoded_token"}
    answer = chat(server, prompt_logprobs=0)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


class Words:
    """A tokenizer of whole and half characters."""

    pieces = {0: b"a", 1: b"\xf0\x9f", 2: b"\x98\x80", 3: b" b", 4: b"<end>", 5: b"\x80"}

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


NAMES = Names(Words())  # type: ignore[arg-type]


def test_half_characters_are_named_by_their_bytes() -> None:
    found = [TokenLogprobs(token, -1.0, 1, (0, 1), (-1.0, -2.0)) for token in (0, 1, 2, 3)]
    lists = json.loads(to_json(completion_logprobs(NAMES, Offsets(NAMES, frozenset()), found)))
    assert lists["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", " b"]
    assert lists["text_offset"] == [0, 1, 1, 2]  # of "a😀 b"
    assert lists["top_logprobs"][3] == {"a": -1.0, "bytes:\\xf0\\x9f": -2.0, " b": -1.0}
    content = json.loads(to_json(chat_logprobs(NAMES, found)))["content"]
    assert [entry["bytes"] for entry in content][1] == [0xF0, 0x9F]


def test_marks_that_are_not_shown_take_no_room() -> None:
    found = [TokenLogprobs(token, -1.0, 1) for token in (0, 4, 3)]
    assert completion_logprobs(NAMES, Offsets(NAMES, frozenset({4})), found)["text_offset"] == [0, 1, 1]
    echo = Echo("a b", (4, 0, 3))  # the tokenizer has put a mark before the text
    lists = completion_logprobs(NAMES, Offsets(NAMES, frozenset({4})), found, echo, found[:2])
    assert lists["text_offset"] == [0, 0, 1, 3, 4, 4]


def test_what_has_no_number_in_json_is_at_the_floor() -> None:
    never = TokenLogprobs(0, -math.inf, 9, (3,), (-math.inf,))
    for found in (
        completion_logprobs(NAMES, Offsets(NAMES, frozenset()), [never]),
        chat_logprobs(NAMES, [never]),
        prompt_logprobs(NAMES, [never]),
    ):
        assert str(FLOOR) in to_json(found).decode()


# ---- strictness


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"temprature": 1}, "unknown_field"),
        ({"tools": [{}]}, "unsupported"),
        ({"best_of": 3}, "unsupported"),
        ({"cache": {"ttl": 0}}, "invalid_value"),
        ({"prompt": [1] * 9000}, "above_limit"),
        ({"max_tokens": 10**6}, "above_limit"),
        ({"n": 200}, "above_limit"),
        ({"stop": ["x"] * 17}, "above_limit"),
        ({"top_p": 0}, "invalid_value"),
        ({"prompt": None, "model": 3}, "invalid_value"),
    ],
    ids=str,
)
def test_programs_can_tell_what_is_wrong(server: Any, fields: dict[str, Any], code: str) -> None:
    error = post(server, "/v1/completions", {**GOOD, **fields}, 400)["error"]
    assert error["code"] == code
    assert error["param"].split(".")[0] in fields
    assert post(server, "/v1/completions", {}, 400)["error"]["code"] == "missing"


def test_neighbours_of_every_feature_are_byte_identical(server: Any) -> None:
    body = {**GOOD, "max_tokens": 300}
    alone = complete(server, **body)["choices"]
    odd = [{"logprobs": 5, "prompt_logprobs": 2}, {"n": 5, "seed": 1, "temperature": 1.5}, {"logit_bias": {"7": -100}},
           {"stop": ["e"], "min_tokens": 5}, {"frequency_penalty": 2, "presence_penalty": -2}, {"echo": True},
           {"cache": {"read": False, "write": False}}, {"deadline_ms": 20}, {"logprobs": 21}]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(complete, server, **body) for _ in range(2)]
        for fields in odd:
            server.http.post("/v1/completions", json={**GOOD, "max_tokens": 60, **fields})
        assert [neighbour.result()["choices"] for neighbour in neighbours] == [alone] * 2


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 8189}, {"max_tokens": None}, {"max_completion_tokens": 8189}], ids=str
)
def test_the_longest_that_fits_is_accepted_and_one_more_is_not(server: Any, fields: dict[str, Any]) -> None:
    path, base = ("/v1/completions", GOOD) if "max_completion_tokens" not in fields else PATHS[1]
    prompt = post(server, f"{path}/render", base)["data"][0]
    room = prompt["max_tokens"] if fields.get("max_tokens", 0) is None else 8192 - prompt["count"]
    name = next(iter(fields))
    body = {**{key: value for key, value in base.items() if key != "max_tokens"}, name: room}
    assert post(server, f"{path}/render", body)["data"][0]["max_tokens"] == room
    error = post(server, path, {**body, name: 8192 - prompt["count"] + 1}, 400)["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "above_limit")
    for number in (prompt["count"], 8193, 8192):
        assert str(number) in error["message"]


# ---- the text


def test_what_ended_the_text_is_part_of_it_if_asked(server: Any) -> None:
    text = complete(server, max_tokens=40)["choices"][0]["text"]
    stop = text[20:23]
    for stream in (False, True):
        wish = {**GOOD, "max_tokens": 40, "stop": [stop], "include_stop_str_in_output": True}
        if stream:
            found = "".join(event["choices"][0]["text"] for event in server.events("/v1/completions", wish))
        else:
            found = post(server, "/v1/completions", wish)["choices"][0]["text"]
        assert found == text[: text.index(stop) + len(stop)]


# ---- the prompt


def test_tokens_and_text_are_each_others(server: Any) -> None:
    found = post(server, "/tokenize", {"prompt": "Grüße, 😀!", "return_token_strs": True})
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 8192
    assert post(server, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "Grüße, 😀!"}
    for body, param in (({"tokens": [49152]}, "tokens"), ({"tokens": "a"}, "tokens"), ({}, "tokens")):
        assert post(server, "/detokenize", body, 400)["error"]["param"] == param
    assert post(server, "/tokenize", {"prompt": "x", "messages": CHAT["messages"]}, 400)["error"]["param"] == "prompt"
    assert post(server, "/tokenize", {"prompt": "x", "model": "gpt-4"}, 404)["error"]["code"] == "model_not_found"


def test_the_rendered_prompt_is_the_one_that_is_computed(server: Any) -> None:
    [prompt] = post(server, "/v1/chat/completions/render", CHAT)["data"]
    assert "<|im_start|>user\nhello<|im_end|>" in prompt["prompt"]
    assert prompt["prompt"].endswith("<|im_start|>assistant\n")
    assert prompt["count"] == len(prompt["prompt_token_ids"]) == chat(server)["usage"]["prompt_tokens"]
    same = complete(server, prompt=prompt["prompt_token_ids"])["choices"][0]["text"]
    assert same == chat(server)["choices"][0]["message"]["content"]
    assert post(server, "/tokenize", {"messages": CHAT["messages"]})["tokens"] == prompt["prompt_token_ids"]
    shapes = post(server, "/v1/completions/render", {**GOOD, "prompt": ["hello", "bye"]})["data"]
    assert [one["prompt"] for one in shapes] == ["hello", "bye"]


def test_odd_contents_are_rendered_as_text(server: Any) -> None:
    """Case B38: an assistant's turn without content stays, and is never the word None."""

    def prompt(content: Any) -> str:
        turn = {"role": "assistant", **({} if content == "missing" else {"content": content}), "tool_calls": []}
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, turn, *CHAT["messages"]]
        return post(server, "/v1/chat/completions/render", {**CHAT, "messages": messages})["data"][0]["prompt"]  # type: ignore[no-any-return]

    empty = prompt("")
    assert "<|im_start|>assistant\n<|im_end|>" in empty
    assert "None" not in empty
    assert prompt(None) == prompt("missing") == prompt([]) == empty
    assert prompt([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == prompt("ab")


# ---- the cache, time, and the queue


def test_what_the_cache_may_do(server: Any) -> None:
    def cached(n: int, **cache: Any) -> int:
        usage = complete(server, prompt=list(range(n, n + 100)), cache=cache)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]

    assert [cached(1000, write=False), cached(1000, write=False), cached(1000), cached(1000)] == [0, 0, 0, 96]
    assert [cached(1000, read=False), cached(1000, salt="mine"), cached(1000, salt="mine")] == [0, 0, 96]
    assert [cached(2000, ttl=1e-6), cached(2000, ttl=1e-6), cached(2000, ttl=9000), cached(2000)] == [0, 0, 0, 96]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_with_an_error(server: Any, stream: bool) -> None:
    body = {**GOOD, "max_tokens": 8000, "deadline_ms": 100, "stream": stream}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == (200 if stream else 408)
    error = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["param"]) == ("deadline_exceeded", "deadline_ms")
    assert "0.1 seconds" in error["message"]
    assert server.idle()["engine_kv_pages_pinned"] == 0


def test_the_queue_is_bounded_by_tokens_and_time(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--max-running", "1", "--max-waiting-tokens", "100",
                   "--queue-timeout", "0.5")  # fmt: skip
    long = {**GOOD, "max_tokens": 4000, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as other,
        other.stream("POST", "/v1/completions", json=long) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(other.post, "/v1/completions", json={**GOOD, "prompt": [1] * 80})
            while not server.metrics()["engine_requests_waiting"]:
                pass
            full = server.http.post("/v1/completions", json={**GOOD, "prompt": [1] * 30})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert "at most 100 tokens" in full.json()["error"]["message"]
            assert 1 <= int(full.headers["retry-after"]) <= 60
            late = waiting.result()
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        assert 1 <= int(late.headers["retry-after"]) <= 60
        never = server.http.post("/v1/completions", json={**GOOD, "prompt": [[1] * 60] * 2})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
    ended = server.idle()
    assert ended['engine_requests_ended_total{reason="timeout"}'] == 1
    assert ended['engine_requests_ended_total{reason="abort"}'] == 1
