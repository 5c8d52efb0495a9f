"""Embeddings through the proxy from real engines with a real (tiny) model: the vectors are theirs, errors too, and
clients that leave, engines that die and engines that stop are nobody else's trouble."""

from __future__ import annotations

import base64
import json
import signal
import socket
import struct

import pytest

ACCEPTED = "engine_requests_accepted_total"
POOLED = [{}, {"pooling": "mean"}, {"normalize": False}, {"encoding_format": "base64"}]
LONG = [[1 + n % 60 for n in range(250)]] * 600  # takes many steps


def tiny_model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                            initializer_range=0.5, eos_token_id=None)  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(started, tmp_path_factory):
    """One for prompts and one for answers, of the same model."""
    pytest.importorskip("torch")
    from tokenizers import Tokenizer, models

    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    Tokenizer(models.WordLevel({str(n): n for n in range(64)})).save(str(folder / "tokenizer.json"))
    fields = {"executor": {"name": "torch"}, "model": str(folder), "max_model_len": 256, "kv_memory": "16MiB"}
    return started("prefill", "decode", **fields)


@pytest.fixture
def proxy(engines, proxied):
    prefill, decode = engines
    yield proxied(prefill=[prefill], decode=[decode])
    for engine in engines:
        if engine.alive:
            engine.idle()


def embed(http, wanted, **more):
    return http.post("/v1/embeddings", json={"input": wanted, **more})


@pytest.mark.parametrize(
    "fields", [{}, {"pooling": "mean"}, {"normalize": False}, {"encoding_format": "base64"}], ids=str
)
def test_vectors_are_the_engines_own(engines, proxy, fields):
    wanted = [[1, 2, 3], [9] * 40, [1, 2, 3]]
    prefill, decode = engines
    before = decode.metrics()[ACCEPTED]
    answer = embed(proxy.http, wanted, **fields)
    assert answer.status_code == 200, answer.text
    said, own = answer.json(), embed(prefill.http, wanted, **fields).json()
    vectors = [one["embedding"] for one in said["data"]]
    if "encoding_format" in fields:
        vectors = [struct.unpack("<32f", base64.b64decode(one)) for one in vectors]
        own["data"] = [{"embedding": struct.unpack("<32f", base64.b64decode(one["embedding"]))} for one in own["data"]]
    for vector, same in zip(vectors, own["data"], strict=True):
        assert vector == pytest.approx(same["embedding"], abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)
    assert said["usage"]["prompt_tokens"] == 46
    assert decode.metrics()[ACCEPTED] == before  # who answers was not asked
    proxy.ended({"answered": 1})


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"input": []}, 400, "input", "invalid_value"),
        ({"input": [[1], [64]]}, 400, "input", "invalid_value"),
        ({"input": [1] * 300}, 400, "input", "above_limit"),
        ({"input": [1], "dimensions": 7}, 400, "dimensions", "unsupported"),
        ({"input": [1], "model": "other"}, 404, "model", "model_not_found"),
        ({"input": [1], "poolin": "mean"}, 400, "poolin", "unknown_field"),
    ],
    ids=str,
)
def test_errors_are_the_engines_own_and_told_once(engines, proxy, body, status, param, code):
    refused = [engine.metrics()[ACCEPTED] for engine in engines]
    answer = proxy.http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code), error
    assert answer.content == engines[0].http.post("/v1/embeddings", json=body).content
    assert [engine.metrics()[ACCEPTED] for engine in engines] == refused
    proxy.ended({"refused": 1})


def test_a_client_that_leaves_ends_them_all_in_the_engine(engines, proxy, wait_for):
    prefill = engines[0]
    aborted = 'engine_requests_ended_total{reason="abort"}'
    before, accepted = prefill.metrics()[aborted], prefill.metrics()[ACCEPTED]
    data = json.dumps({"input": LONG}).encode()
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        wait_for(lambda: prefill.metrics()[ACCEPTED] > accepted, "nothing came")
    wait_for(lambda: prefill.metrics()[aborted] > before, "nothing was ended")
    proxy.ended({"left": 1})
    prefill.idle()


def test_an_engine_that_dies_or_stops_is_followed_by_another(engines, proxied, frozen, wait_for):
    """What was asked of it is asked of the other one; with none left the client is told."""
    prefill, decode = engines
    proxy = proxied(prefill=[prefill], decode=[decode], poll=0.1, peer_timeout=1.0)
    expected = embed(decode.http, [1, 2, 3]).json()["data"]
    frozen(prefill)
    answer = embed(proxy.http, [1, 2, 3])
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["embedding"] == pytest.approx(expected[0]["embedding"], abs=1e-5)
    prefill.signal(signal.SIGCONT)
    wait_for(lambda: prefill.url in proxy.ready(), "it is not ready again")
    prefill.kill()
    assert embed(proxy.http, [1, 2, 3]).status_code == 200
    decode.kill()
    answer = embed(proxy.http, [1, 2, 3])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
    assert answer.json()["error"]["code"] == "no_engine"
    proxy.ended({"answered": 2, "unavailable": 1})
