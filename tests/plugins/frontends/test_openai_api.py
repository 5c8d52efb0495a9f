"""What the endpoints accept, refuse and answer, over HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

GOOD = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def complete(server: Any, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json={**GOOD, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


# ---- answers


def test_completion_has_openais_shape(server: Any) -> None:
    body = complete(server)
    assert body["object"] == "text_completion"
    [choice] = body["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["text"]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["total_tokens"] == 11


def test_chat_has_openais_shape(server: Any) -> None:
    body = server.http.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"


def test_cached_tokens_are_reported(server: Any) -> None:
    prompt = list(range(500, 600))
    assert complete(server, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert complete(server, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    salted = complete(server, prompt=prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", GOOD), ("/v1/chat/completions", CHAT)], ids=["completion", "chat"]
)
def test_stream_joined_is_the_whole_answer(server: Any, path: str, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 60, "n": 2, "seed": 3, "temperature": 1}
    whole = server.http.post(path, json=body).raise_for_status().json()
    parts = server.events(path, {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        text = "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in mine)
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["finish_reason"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 120
    assert all(part["usage"] is None for part in parts[:-1])
    assert len({part["id"] for part in parts}) == 1


def test_nothing_is_told_before_there_is_a_token(start: Any) -> None:
    """Load clients take the first event for the first token. What ends in the queue has no beginning."""
    server = start("--executor", "sim", "--executor.step-ms", "2", "--max-running", "1")
    with server.http.stream("POST", "/v1/completions", json={**GOOD, "max_tokens": 8000, "stream": True}) as running:
        lines = running.iter_lines()
        next(lines)
        late = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "stream": True, "deadline_ms": 100})
    assert late.status_code == 200
    assert json.loads(late.text.strip().removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    server.idle()
    first, second, *_ = server.events("/v1/chat/completions", {**CHAT, "n": 2})
    deltas = [event["choices"][0] for event in (first, second)]
    assert [(one["index"], one["delta"]["role"]) for one in deltas] == [(0, "assistant"), (1, "assistant")]


def test_stream_without_usage_has_none(server: Any) -> None:
    assert all("usage" not in event for event in server.events("/v1/completions", GOOD))


def test_four_shapes_of_prompt_and_the_order_of_choices(server: Any) -> None:
    assert len(complete(server, prompt="once")["choices"]) == 1
    assert len(complete(server, prompt=["once", "twice"])["choices"]) == 2
    alone = [complete(server, prompt=[n, n])["choices"][0]["text"] for n in range(4)]
    body = complete(server, prompt=[[n, n] for n in range(4)])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == alone
    assert body["usage"]["prompt_tokens"] == 8


def test_n_choices_differ_and_repeat(server: Any) -> None:
    wish = {"prompt": [[1, 2], [3, 4]], "n": 3, "seed": 7, "temperature": 1}
    first, second = complete(server, **wish), complete(server, **wish)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 6
    assert first["usage"]["prompt_tokens"] == 4  # each prompt once
    alone = complete(server, prompt=[3, 4], seed=7, temperature=1, n=2)
    assert texts[3:5] == [choice["text"] for choice in alone["choices"]]  # index = prompt * n + k
    assert complete(server, prompt=[3, 4], seed=8, temperature=1)["choices"][0]["text"] not in texts


def test_stop_strings(server: Any) -> None:
    text = complete(server, max_tokens=40)["choices"][0]["text"]
    stop = text[20:23]
    [choice] = complete(server, max_tokens=40, stop=stop)["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["finish_detail"]) == ("stop", stop)
    streamed = server.events("/v1/completions", {**GOOD, "max_tokens": 40, "stop": ["\x01", stop]})
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


def test_max_tokens_unset_is_all_the_room(server: Any) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = complete(server, prompt=[1] * (limit - 5), max_tokens=None)
    assert body["usage"]["completion_tokens"] == 5
    assert body["choices"][0]["finish_reason"] == "length"


def test_fields_without_effect_are_accepted(server: Any) -> None:
    harmless = {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": None, "logit_bias": {}, "echo": False}
    harmless |= {"best_of": 1, "suffix": None, "top_k": -1, "top_p": 1, "stop": None, "priority": 1}
    harmless |= {"user": "me", "metadata": {"team": "a"}}
    for clamped in ({"top_k": V + 1}, {"top_k": 0}, {"temperature": 1e-9}):
        assert complete(server, **clamped)["choices"] == complete(server)["choices"]
    assert complete(server, **harmless)["choices"] == complete(server)["choices"]
    chat = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "store": False}
    assert server.http.post("/v1/chat/completions", json={**CHAT, **chat}).status_code == 200


def test_request_id_is_echoed_when_it_fits_in_a_header(server: Any) -> None:
    post = server.http.post
    assert post("/v1/completions", json=GOOD, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    for odd in ("", "x" * 300, "with space"):
        given = post("/v1/completions", json=GOOD, headers={"x-request-id": odd})
        assert given.status_code == 200
        assert given.headers["x-request-id"] not in ("", odd)


def test_a_server_says_what_it_is(server: Any) -> None:
    said = server.http.get("/v1/engine").json()
    assert (said["role"], said["model"], said["page_size"]) == ("both", "sim", 16)
    assert said["fingerprint"] == "sim-49152"
    assert said["connectors"] == {}
    assert said["health"] == server.http.get("/health").json()
    assert server.http.get("/v1/engine").json()["incarnation"] == said["incarnation"]


def test_two_requests_of_one_id_at_once_do_not_mix(server: Any) -> None:
    alone = [complete(server, prompt=[n], max_tokens=50)["choices"] for n in range(8)]

    def ask(n: int) -> Any:
        body = {**GOOD, "prompt": [n], "max_tokens": 50}
        return server.http.post("/v1/completions", json=body, headers={"x-request-id": "same"}).json()["choices"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_models_version_health_and_openapi(server: Any) -> None:
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "sim"
    assert model["max_model_len"] == 8192
    assert server.http.get("/v1/models/sim").json() == model
    assert server.http.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/version").json()["version"]
    document = server.http.get("/openapi.json").json()
    assert "ChatRequest" in document["components"]["schemas"]
    post = document["paths"]["/v1/completions"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/CompletionRequest")


# ---- refusals

V = 49152
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt", "at least one token"),
    ("/v1/completions", {"prompt": []}, "prompt", "at least one token"),
    ("/v1/completions", {"prompt": [[]]}, "prompt", "at least one token"),
    ("/v1/completions", {"prompt": [-1]}, "prompt", "outside the vocabulary (0 … 49151)"),
    ("/v1/completions", {"prompt": [V]}, "prompt", "outside the vocabulary"),
    ("/v1/completions", {"prompt": [2**63]}, "prompt", "outside the vocabulary"),
    ("/v1/completions", {"prompt": [2**70]}, "prompt", "outside the vocabulary"),
    ("/v1/completions", {"prompt": [1.5]}, "prompt", "integers, not float"),
    ("/v1/completions", {"prompt": [True]}, "prompt", "integers, not bool"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt", "mixes"),
    ("/v1/completions", {"prompt": {"a": 1}}, "prompt", "must be a string"),
    ("/v1/completions", {"prompt": None}, "prompt", "must be a string"),
    ("/v1/completions", {"prompt": [1] * 8192}, "prompt", "at most 8191"),
    ("/v1/completions", {"prompt": [[1], [1] * 9000]}, "prompt", "(prompt 1 of 2) has 9000 tokens"),
    ("/v1/completions", {"prompt": [[1], []]}, "prompt", "(prompt 1 of 2)"),
    ("/v1/completions", {"prompt": [[1]] * 3000}, "prompt", "at most 2112"),
    ("/v1/completions", {"prompt": ["x"] * 100_000}, "prompt", "has 100000 strings, at most 8448"),
    ("/v1/completions", {"n": 128, "prompt": [[1]] * 17}, "prompt", "at most 2112"),
    ("/v1/completions", {"n": 0}, "n", "between 1 and 128"),
    ("/v1/completions", {"n": 10**6}, "n", "between 1 and 128"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("/v1/completions", {"max_tokens": -1}, "max_tokens", "at least 1"),
    ("/v1/completions", {"max_tokens": 8190}, "max_tokens", "3 prompt tokens + max_tokens 8190 = 8193"),
    ("/v1/completions", {"max_tokens": "8"}, "max_tokens", "valid integer"),
    ("/v1/completions", {"temperature": -1}, "temperature", "between 0 and 100"),
    ("/v1/completions", {"temperature": 1e9}, "temperature", "between 0 and 100"),
    ("/v1/completions", {"top_p": 0}, "top_p", "above 0"),
    ("/v1/completions", {"top_p": 2}, "top_p", "at most 1"),
    ("/v1/completions", {"top_k": 2**70}, "top_k", "64 bits"),
    ("/v1/completions", {"priority": -(2**70)}, "priority", "64 bits"),
    ("/v1/completions", {"seed": int("9" * 4000)}, "seed", "64 bits"),
    ("/v1/completions", {"max_tokens": None, "min_tokens": 8190}, "min_tokens", "between 0 and 8189"),
    ("/v1/completions", {"top_k": -2}, "top_k", "0 (off) or more"),
    ("/v1/completions", {"seed": 2**63}, "seed", "64 bits"),
    ("/v1/completions", {"stop": ["", "END"]}, "stop", "empty stop string"),
    ("/v1/completions", {"stop": ["x"] * 17}, "stop", "at most 16"),
    ("/v1/completions", {"stop": [1]}, "stop[0]", "valid string"),
    ("/v1/completions", {"stop_token_ids": [V]}, "stop_token_ids", "outside the vocabulary"),
    ("/v1/completions", {"min_tokens": 9}, "min_tokens", "between 0 and max_tokens"),
    ("/v1/completions", {"logit_bias": {str(V): 1}}, "logit_bias", "outside the vocabulary"),
    ("/v1/completions", {"logit_bias": {"-3": 5}}, "logit_bias", "outside the vocabulary"),
    ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias", "keys are token ids, got 'x'"),
    ("/v1/completions", {"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
    ("/v1/completions", {"logit_bias": {"1": "x"}}, "logit_bias.1", "valid number"),
    ("/v1/completions", {"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "at most 1024"),
    ("/v1/completions", {"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ("/v1/completions", {"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
    ("/v1/completions", {"frequency_penalty": -3}, "frequency_penalty", "between -2 and 2"),
    ("/v1/completions", {"min_p": 1.5}, "min_p", "between 0 and 1"),
    ("/v1/completions", {"logprobs": 21}, "logprobs", "between 0 and 20"),
    ("/v1/completions", {"logprobs": True}, "logprobs", "valid integer"),
    ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20"),
    ("/v1/completions", {"prompt_logprobs": 20, "prompt": [1] * 4000}, "prompt_logprobs", "at most 65536"),
    ("/v1/completions", {"prompt_logprobs": 20, "prompt": [1] * 40, "n": 100}, "prompt_logprobs", "x n 100 = 84000"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("/v1/completions", {"best_of": 2}, "best_of", "only accepted value is 1"),
    ("/v1/completions", {"stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128"),
    ("/v1/completions", {"stop": "x" * 1025}, "stop", "at most 1024"),
    ("/v1/completions", {"skip_special_tokens": 1}, "skip_special_tokens", "valid boolean"),
    ("/v1/completions", {"deadline_ms": 0}, "deadline_ms", "greater than or equal to 1"),
    ("/v1/completions", {"deadline_ms": 10**15}, "deadline", "between"),
    ("/v1/completions", {"cache": {"ttl": 0}}, "cache.ttl", "greater than 0"),
    ("/v1/completions", {"cache": {"ttl": 1e10}}, "cache.ttl", "less than or equal to 1000000000"),
    ("/v1/chat/completions", {"cache": {"ttl": "soon"}}, "cache.ttl", "valid number"),
    ("/v1/completions", {"cache": {"ttl": 60, "write": False}}, "cache.ttl", "write"),
    ("/v1/completions", {"cache": {"reed": False}}, "cache.reed", "unknown field"),
    ("/v1/completions", {"cache": {"salt": "a"}, "cache_salt": "b"}, "cache_salt", "differs"),
    ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs", "logprobs is true"),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "logprobs", "between 0 and 20"),
    ("/v1/chat/completions", {"logprobs": 1}, "logprobs", "valid boolean"),
    ("/v1/chat/completions", {"echo": True}, "echo", "only accepted value is false"),
    ("/v1/completions", {"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream"),
    ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
    ("/v1/chat/completions", {"messages": [{"role": "bob", "content": "x"}]}, "messages[0].role", "'user'"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages", "needs content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "'text'",
    ),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ("/v1/completions", {"tools": [{"type": "function"}]}, "tools", "not supported"),
    ("/v1/chat/completions", {"max_completion_tokens": 9}, "max_completion_tokens", "max_tokens is 8"),
    ("/v1/chat/completions", {"prompt": "x"}, "prompt", "unknown field"),
]


def shorten(value: Any) -> str:
    return json.dumps(value)[:40]


@pytest.mark.parametrize(("path", "fields", "param", "words"), BAD, ids=shorten)
def test_bad_requests_name_field_and_limit(
    server: Any, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = server.http.post(path, json={**(CHAT if "chat" in path else GOOD), **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty: send a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 10_000, "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 10_000, "must be a JSON object"),
        (b"[" * 100_000, "at most 16384"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "is required"),
    ],
)
def test_malformed_bodies(server: Any, body: bytes, words: str) -> None:
    answer = server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_refusals_do_not_touch_neighbours(server: Any) -> None:
    body = {**GOOD, "max_tokens": 400}
    alone = complete(server, **body)["choices"]
    accepted = server.idle()["engine_requests_accepted_total"]
    with ThreadPoolExecutor(4) as pool:
        neighbours = [pool.submit(complete, server, **body) for _ in range(3)]
        for path, fields, _, _ in BAD:
            assert server.http.post(path, json={**(CHAT if "chat" in path else GOOD), **fields}).status_code == 400
        assert [neighbour.result()["choices"] for neighbour in neighbours] == [alone] * 3
    assert server.idle()["engine_requests_accepted_total"] == accepted + 3


def test_unknown_model_and_route(server: Any) -> None:
    answer = server.http.post("/v1/completions", json={**GOOD, "model": "gpt-4"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http.post("/v1/completions", json={**GOOD, "model": "sim"}).status_code == 200
    answer = server.http.get("/v2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = server.http.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/completions", 400), ("GET", "/v2", 404), ("GET", "/v1/chat/completions", 405)],
)
def test_error_answers_carry_the_request_id(server: Any, method: str, path: str, status: int) -> None:
    for wanted, given in (("mine", "mine"), ("", None), ("x" * 300, None), ("é", None)):
        answer = server.http.request(method, path, content=b"{", headers={"x-request-id": wanted.encode()})
        assert answer.status_code == status
        if given is None:
            assert len(answer.headers["x-request-id"]) == 32
        else:
            assert answer.headers["x-request-id"] == given


def test_an_author_name_is_accepted_and_changes_nothing(server: Any) -> None:
    named = {**CHAT, "messages": [{"role": "user", "name": "ann", "content": "hello"}]}
    answers = [server.http.post("/v1/chat/completions", json=body).raise_for_status().json() for body in (CHAT, named)]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_the_length_limit_is_the_one_enforced(start: Any) -> None:
    server = start("--executor", "sim", "--executor.pages", "4", "--page-size", "16", "--max-model-len", "100")
    [card] = server.http.get("/v1/models").json()["data"]
    assert (card["max_model_len"], card["kv_pool_tokens"]) == (100, 64)
    [choice] = complete(server, prompt=[1] * 10, max_tokens=90)["choices"]  # above the pool: accepted, and ends there
    assert (choice["finish_reason"], choice["finish_detail"]) == ("length", "kv_capacity")
    late = server.http.post("/v1/completions", json={**GOOD, "prompt": [1] * 10, "max_tokens": 91})
    assert late.status_code == 400
    for length, limit in ((63, None), (64, None), (65, "the whole KV pool holds 64"), (99, "64"), (100, "at most 99")):
        answer = server.http.post("/v1/completions", json={**GOOD, "prompt": [1] * length, "max_tokens": None})
        assert answer.status_code == (400 if limit else 200), answer.text
        assert limit is None or (limit in answer.text and str(length) in answer.text)
    for wrong in (0, -1, 10**30):
        answer = server.http.post("/v1/completions", json={**GOOD, "max_tokens": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("fields", [{"top_k": 2**70, "n": 128, "max_tokens": 2}, {"priority": 2**64, "n": 100},
                                    {"min_tokens": 2**70, "max_tokens": None, "n": 100}], ids=str)  # fmt: skip
def test_numbers_that_no_wire_carries_leave_nothing_behind(server: Any, fields: dict[str, Any]) -> None:
    for _ in range(4):  # 2112 may be open
        answer = server.http.post("/v1/completions", json={**GOOD, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))
    assert server.http.get("/health").json()["open_requests"] == 0
    assert server.http.post("/v1/completions", json=GOOD).status_code == 200


@pytest.mark.parametrize("megabytes", [9, 50])
def test_too_large_bodies(server: Any, megabytes: int) -> None:
    accepted = server.metrics()["engine_requests_accepted_total"]
    answer = server.http.post("/v1/completions", content=b" " * megabytes * 2**20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert server.http.get("/health").status_code == 200
    assert server.metrics()["engine_requests_accepted_total"] == accepted


def test_too_large_bodies_in_pieces(server: Any) -> None:
    answer = server.http.post("/v1/completions", content=(b" " * 2**20 for _ in range(10)))
    assert answer.status_code == 413


def test_health_stays_quick_while_a_large_prompt_is_tokenised(server: Any) -> None:
    body = {**GOOD, "prompt": "many words and numbers 1 2 3 " * 250_000}
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.http.post, "/v1/completions", json=body)
        slowest = 0.0
        while not large.done():
            slowest = max(slowest, server.http.get("/health").elapsed.total_seconds())
        assert large.result().status_code == 400
    assert "more than 8192 tokens" in large.result().text
    assert slowest < 5  # generous: tokenised as a whole it takes longer, and the tokenizer may hold the interpreter


# ---- keys and queues


def test_api_key(start: Any) -> None:
    server = start("--executor", "sim", "--api-key", "sesame")
    ask = lambda headers: server.http.post("/v1/completions", json=GOOD, headers=headers)  # noqa: E731
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Bearer"}):
        answer = ask(headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert ask({"authorization": "Bearer sesame"}).status_code == 200
    assert server.http.get("/health/live").status_code == 200
    assert "sesame" not in server.output


def test_full_queue_is_429_for_the_whole_request(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--max-running", "1", "--max-waiting", "2")
    long = {**GOOD, "max_tokens": 4000, "stream": True}
    with httpx.Client(base_url=server.url) as other, other.stream("POST", "/v1/completions", json=long) as running:
        lines = running.iter_lines()  # kept: httpx closes the connection when its iterator is dropped
        next(lines)
        full = server.http.post("/v1/completions", json={**GOOD, "n": 3})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        never = server.http.post("/v1/completions", json={**GOOD, "n": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert server.metrics()["engine_requests_waiting"] == 0
    server.idle()
    assert server.http.post("/v1/completions", json={**GOOD, "n": 3}).status_code == 200
