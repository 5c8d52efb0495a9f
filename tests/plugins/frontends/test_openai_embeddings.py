"""``/v1/embeddings`` over HTTP: shapes, limits, who leaves, what is counted; and the official client, unmodified."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine import AsyncEngine, EngineConfig
from engine.plugins.frontends import _openai_embeddings
from engine.plugins.frontends.openai import OpenAIFrontend

FAULTS = Path(__file__).parents[2] / "core" / "serve"
WIDTH = 32
TEXTS = ["What a day.", "It rained.", "Cats sleep."]


def embed(server: Any, **body: Any) -> Any:
    answer = server.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(answer: Any) -> list[list[float]]:
    """The vectors, in order."""
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    assert {item["object"] for item in answer["data"]} == {"embedding"}
    return [item["embedding"] for item in answer["data"]]


def refused(server: Any, **body: Any) -> tuple[str | None, str, str]:
    answer = server.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"], error["message"]


# ---- shapes


def test_an_answer_as_openai_has_it(server: Any) -> None:
    answer = embed(server, model="sim", input=[[1, 2, 3], [4]], user="u", priority=-1, deadline_ms=60_000)
    assert (answer["object"], answer["model"]) == ("list", "sim")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (4, 4)
    first, second = numbers(answer)
    assert len(first) == len(second) == WIDTH
    assert sum(number * number for number in first) == pytest.approx(1, abs=1e-5)


@pytest.mark.model  # its tokenizer
def test_four_shapes_are_one(server: Any) -> None:
    ids = [server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    whole = numbers(embed(server, input=TEXTS))
    assert whole == numbers(embed(server, input=ids))
    for text, tokens, wanted in zip(TEXTS, ids, whole, strict=True):
        assert numbers(embed(server, input=text)) == numbers(embed(server, input=tokens)) == [wanted]


def test_base64_is_the_same_numbers(server: Any) -> None:
    asked: dict[str, Any] = {"input": [[5, 6], [7]], "normalize": False, "pooling": "mean"}
    plain = numbers(embed(server, **asked, encoding_format="float"))
    coded = numbers(embed(server, **asked, encoding_format="base64"))
    assert [list(struct.unpack(f"<{WIDTH}f", base64.b64decode(one))) for one in coded] == plain  # type: ignore[arg-type]
    assert plain == numbers(embed(server, **asked, encoding_format=None))


def test_pooling_and_length(server: Any) -> None:
    """The last state is that of the last token; the mean is over all of them."""
    states = [numbers(embed(server, input=[9, 8, 7][:upto], normalize=False))[0] for upto in (1, 2, 3)]
    assert numbers(embed(server, input=[9, 8, 7], normalize=False, pooling="last"))[0] == states[2]
    mean = numbers(embed(server, input=[9, 8, 7], normalize=False, pooling="mean"))[0]
    assert mean == pytest.approx([sum(column) / 3 for column in zip(*states, strict=True)], abs=1e-4)
    length = sum(number * number for number in mean) ** 0.5
    unit = numbers(embed(server, input=[9, 8, 7], pooling="mean"))[0]
    assert unit == pytest.approx([number / length for number in mean], abs=1e-5)


def test_the_cache_is_read_for_the_last_state_alone(server: Any) -> None:
    prompt = list(range(300, 364))
    cached = [
        embed(server, input=prompt, cache={"salt": "emb"}, pooling=pooling)["usage"]["prompt_tokens_details"]
        for pooling in ("mean", "mean", "last")
    ]
    assert [one["cached_tokens"] for one in cached] == [0, 0, 48]
    off = embed(server, input=prompt, cache={"salt": "emb", "read": False})
    assert off["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# ---- limits


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "input", "is required"),
        ({"input": None}, "input", "must be a string"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": []}, "input", "is empty"),
        ({"input": [[]]}, "input", "is empty"),
        ({"input": [[1], []]}, "input", r"(prompt 1 of 2) is empty"),
        ({"input": ["a", [1]]}, "input", "mixes"),
        ({"input": [1, "a"]}, "input", "mixes"),
        ({"input": [1.5]}, "input", "token ids are integers"),
        ({"input": [True]}, "input", "token ids are integers"),
        ({"input": [-1]}, "input", "outside the vocabulary"),
        ({"input": [2**70]}, "input", "outside the vocabulary"),
        ({"input": [1] * 9000}, "input", "has 9000 tokens; at most 8191"),
        ({"input": [[1], [2] * 9000]}, "input", "(prompt 1 of 2) has 9000 tokens"),
        ({"input": [[1]] * 5000}, "input", "has 5000 texts: at most"),
        ({"input": [1], "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": [1], "dimensions": 8}, "dimensions", f"have {WIDTH} numbers"),
        ({"input": [1], "dimensions": "8"}, "dimensions", "integer"),
        ({"input": [1], "pooling": "max"}, "pooling", "mean"),
        ({"input": [1], "normalize": 1}, "normalize", "boolean"),
        ({"input": [1], "deadline_ms": 0}, "deadline_ms", "greater"),
        ({"input": [1], "imput": [1]}, "imput", "unknown field; did you mean 'input'"),
        ({"input": [1], "temperature": 1.0}, "temperature", "unknown field"),
        ({"input": [1], "stream": True}, "stream", "unknown field"),
    ],
)
def test_what_is_wrong_is_named(server: Any, body: dict[str, Any], field: str, words: str) -> None:
    before = server.metrics()["engine_requests_accepted_total"]
    param, _, message = refused(server, **body)
    assert (param, words in message) == (field, True), message
    assert server.metrics()["engine_requests_accepted_total"] == before


def test_the_models_own_number_of_dimensions_is_fine(server: Any) -> None:
    assert len(numbers(embed(server, input=[1], dimensions=WIDTH))[0]) == WIDTH


def test_another_model_is_not_found(server: Any) -> None:
    answer = server.http.post("/v1/embeddings", json={"input": [1], "model": "text-embedding-3-small"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_neighbours_of_bad_ones_are_byte_for_byte_what_they_are(server: Any) -> None:
    good: dict[str, Any] = {
        "input": [[n, n + 1] * 40 for n in range(8)],
        "pooling": "mean",
        "encoding_format": "base64",
    }
    bad: list[dict[str, Any]] = [{"input": [[1], []]}, {"input": [-1]}, {"input": [1], "dimensions": 2}, {"input": 7}]
    alone = numbers(embed(server, **good))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(numbers(embed(server, **good)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for body in bad * 5:
        refused(server, **body)
    for thread in threads:
        thread.join()
    assert found == [alone] * 4


# ---- what is counted, and who leaves


def ended(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    names = {name: name.partition('"')[2][:-2] for name in now if name.startswith("engine_requests_ended_total{")}
    return {names[name]: now[name] - before.get(name, 0) for name in names if now[name] != before.get(name, 0)}


def test_each_is_counted_once_as_stopped(server: Any) -> None:
    before = server.idle()
    embed(server, input=[[1, 2], [3], [4, 5, 6]])
    now = server.idle()
    assert ended(now, before) == {"stop": 3}
    assert now["engine_requests_accepted_total"] - before["engine_requests_accepted_total"] == 3
    assert now["engine_prompt_tokens_total"] - before["engine_prompt_tokens_total"] == 6
    assert now["engine_output_tokens_total"] == before["engine_output_tokens_total"]
    route = 'engine_http_requests_total{path="/v1/embeddings",status="200"}'
    assert now[route] - before.get(route, 0) == 1


def test_a_client_that_leaves_ends_all_of_its_texts(server: Any) -> None:
    before = server.idle()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/embeddings", json={"input": [[n] * 2000 for n in range(200)]}, timeout=0.3)
    now = server.idle()
    counts = ended(now, before)
    assert sum(counts.values()) == 200
    assert set(counts) <= {"stop", "abort"}
    assert counts["abort"] > 0
    assert now["engine_kv_pages_pinned"] == 0


def test_a_deadline_ends_it(server: Any) -> None:
    answer = server.http.post("/v1/embeddings", json={"input": [[n] * 2000 for n in range(100)], "deadline_ms": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert server.idle()["engine_kv_pages_pinned"] == 0


# ---- in an application


def posted(*bodies: dict[str, Any], executor: Any = "sim", path: str = "/v1/embeddings", **app: Any) -> list[Any]:
    """Answers to bodies, one after the other, of an interface in this process."""
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": executor}), in_process=True)

    async def main() -> list[Any]:
        transport = httpx.ASGITransport(app=OpenAIFrontend().app(engine, **app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            found = []
            for body in bodies:
                headers = {"Authorization": f"Bearer {key}"} if (key := body.pop("key", None)) else {}
                found.append(await http.post(path, json=body, headers=headers))
            stats = await engine.stats()
            assert (stats["running"], stats["waiting"], stats["pages_pinned"]) == (0, 0, 0)
            return found

    try:
        return asyncio.run(main())
    finally:
        engine.shutdown()


def test_an_executor_that_cannot_says_so() -> None:
    [answer] = posted({"input": [1]}, executor={"name": "sim", "hidden_size": 0})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "pooling", "unsupported")
    assert "embeddings cannot be computed here" in error["message"]


def test_a_row_that_fails_is_an_error_and_no_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))
    executor = "faulty_executor:FaultyExecutor"
    bad, good = posted({"input": [[1], [40_003]]}, {"input": [[1], [2]]}, executor=executor)
    assert (bad.status_code, bad.json()["error"]["code"]) == (500, "request_failed")
    assert good.status_code == 200


def test_it_needs_a_key_where_there_are_keys() -> None:
    answers = posted({"input": [1]}, {"input": [1], "key": "wrong"}, {"input": [1], "key": "secret"}, api_key="secret")
    assert [answer.status_code for answer in answers] == [401, 401, 200]


def test_a_large_answer_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile; the bytes are those of a small one."""
    threads: list[str] = []
    real = _openai_embeddings.written

    def written(*given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        monkeypatch.setattr(_openai_embeddings, "LARGE_ANSWER", 2 * WIDTH - 1)  # of the next one
        return real(*given)

    monkeypatch.setattr(_openai_embeddings, "written", written)
    body = {"input": [[1, 2], [3]], "cache": {"read": False}}
    small, large = posted(dict(body), dict(body))
    assert small.content == large.content
    assert threads[0] == threading.main_thread().name != threads[1]


def test_the_interface_describes_it(server: Any) -> None:
    document = server.http.get("/openapi.json").json()
    body = document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert {"input", "encoding_format", "dimensions", "pooling", "normalize", "cache"} <= set(schema["properties"])
    assert schema["required"] == ["input"]


# ---- the official client


def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_the_sdk_reads_what_it_asks_for(server: Any) -> None:
    """It asks for base64 unless it is told otherwise, and makes numbers of it."""
    with client(server) as sdk:
        answer = sdk.embeddings.create(model="sim", input=[[1, 2, 3], [4]])
        assert [len(item.embedding) for item in answer.data] == [WIDTH, WIDTH]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
        plain = sdk.embeddings.create(model="sim", input=[[1, 2, 3], [4]], encoding_format="float")
        assert [item.embedding for item in plain.data] == [pytest.approx(item.embedding) for item in answer.data]
        own = sdk.embeddings.create(model="sim", input=[[1, 2, 3]], extra_body={"pooling": "mean"})
        assert own.data[0].embedding != answer.data[0].embedding
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            sdk.embeddings.create(model="sim", input=[1], dimensions=5)
