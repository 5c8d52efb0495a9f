"""What clients see of engines that fail: one engine for prompts, two that answer, all real, on executor ``sim``."""

from __future__ import annotations

import http.client
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import pytest

STYLES = ("vllm", "sglang")
NUMBERS = count(1000)


def prompt(tokens=100):
    """One that nobody has seen."""
    start = next(NUMBERS)
    return [start] + [(start + at) % 40000 for at in range(1, tokens)]


def body(max_tokens=8, **other):
    return {"prompt": prompt(), "max_tokens": max_tokens, "temperature": 0, **other}


def text(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(stream: bytes) -> str:
    """The text of a stream, however its tokens came together."""
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.fixture(scope="module")
def engines(started):
    return started("prefill", "decode", "decode")


@pytest.fixture(autouse=True)
def whole_again(engines):
    """Each test begins with engines that run, and leaves nothing open on them, and all pages back."""
    for engine in engines:
        if not engine.alive:
            engine.start()
    yield
    for engine in engines:
        if engine.alive:
            engine.idle()


@pytest.fixture
def scene(engines, proxied):
    """``scene(**options)`` -> a proxy over one engine for prompts and two that answer."""
    giver, *takers = engines
    return lambda **options: proxied(**{"prefill": [giver], "decode": takers, **options})


# ---- when all is well


@pytest.mark.parametrize("style", STYLES)
def test_answers_are_those_of_one_engine(style, scene, engines):
    proxy, giver = scene(style=style), engines[0]
    wishes = [body(seed=n, n=n % 2 + 1, user="someone", metadata={"team": "a"}) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda wish: proxy.ask(**wish).raise_for_status().json(), wishes))
    for wish, answer in zip(wishes, answers, strict=True):
        alone = giver.ask(**wish)
        assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in alone["choices"]]
    assert proxy.count("pairings", how="handed") == 6
    proxy.ended({"answered": 6})
    assert [cached(answer) for answer in answers] == [96] * 6


def test_several_prompts_in_one_request(scene, engines):
    wish = {**body(), "prompt": [prompt(), prompt(40), prompt()]}
    answer = scene().ask(**wish).raise_for_status().json()
    assert [c["text"] for c in answer["choices"]] == [c["text"] for c in engines[0].ask(**wish)["choices"]]
    assert cached(answer) == 96 + 32 + 96


@pytest.fixture
def heard(monkeypatch):
    """The bytes of streams as they come from engines."""
    pieces, original = [], httpx.Response.aiter_raw

    async def listen(self, *args):
        async for piece in original(self, *args):
            if self.headers["content-type"].startswith("text/event-stream"):
                pieces.append(piece)
            yield piece

    monkeypatch.setattr(httpx.Response, "aiter_raw", listen)
    return pieces


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_come_through_byte_for_byte(path, scene, engines, heard):
    """Executor ``sim`` has the default model's tokenizer, and so a chat template."""
    proxy, giver = scene(), engines[0]
    wish = {**body(12), "stream": True, "stream_options": {"include_usage": True}}
    if path.endswith("chat/completions"):
        del wish["prompt"]
        wish["messages"] = [{"role": "user", "content": f"Number {next(NUMBERS)} ü 😀 " * 30}]
    through = proxy.http.post(path, json=wish, headers={"x-request-id": "mine"})
    assert through.content == b"".join(heard)
    assert through.content.endswith(b"data: [DONE]\n\n")
    direct = giver.http.post(path, json=wish, headers={"x-request-id": "mine"})
    assert said(through.content) == said(direct.content)
    for name in ("content-type", "x-request-id", "cache-control"):
        assert through.headers[name] == direct.headers[name]


def answer_of(response):
    """What a response says, without what is new each time."""
    [item] = response["output"]
    return item["content"][0]["text"], response["status"], response["usage"]["output_tokens"], response["metadata"]


@pytest.mark.parametrize("style", STYLES)
def test_responses_are_those_of_one_engine(style, scene, engines):
    proxy, giver = scene(style=style), engines[0]
    wish = {"input": f"Number {next(NUMBERS)} " * 40, "instructions": "Be odd.", "max_output_tokens": 12,
            "metadata": {"team": "a"}}  # fmt: skip
    through = proxy.http.post("/v1/responses", json=wish).raise_for_status().json()
    assert answer_of(through) == answer_of(giver.http.post("/v1/responses", json=wish).raise_for_status().json())
    assert through["metadata"] == {"team": "a"}
    assert through["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert proxy.count("pairings", how="handed") == 1
    proxy.ended({"answered": 1})


def test_streams_of_responses_come_through_byte_for_byte(scene, heard):
    proxy = scene()
    wish = {"input": f"Number {next(NUMBERS)} ü 😀 " * 30, "max_output_tokens": 12, "stream": True}
    through = proxy.http.post("/v1/responses", json=wish)
    assert through.content == b"".join(heard)
    events = [
        json.loads(line.removeprefix("data: ")) for line in through.text.splitlines() if line.startswith("data: ")
    ]
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.incomplete"]
    assert proxy.count("pairings", how="handed") == 1
    proxy.ended({"answered": 1})


def test_responses_that_are_wrong_are_refused_by_the_engine(scene, engines):
    proxy = scene()
    for wrong in ({"max_output_tokens": 0}, {"inputs": "x"}, {"model": "gpt-4"}, {"store": True}):
        wish = {"input": "x", **wrong}
        answer, direct = (one.post("/v1/responses", json=wish) for one in (proxy.http, engines[1].http))
        assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
    proxy.ended({"refused": 4})


def test_errors_of_requests_are_the_engines_own(scene, engines):
    proxy = scene()
    for wrong in (
        {"max_tokens": -1},
        {"temperatur": 1},
        {"prompt": "x", "n": "two"},
        {"model": "gpt-4"},
        {"prompt": []},
    ):
        wish = {**body(), **wrong}
        answer, direct = proxy.ask(**wish), engines[1].http.post("/v1/completions", json=wish)
        assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
    proxy.ended({"refused": 5})
    assert proxy.ready() == {engine.url for engine in engines}, "no engine is blamed for it"


@pytest.mark.parametrize("style", STYLES)
def test_a_deadline_is_the_clients_own_limit(style, scene, engines, proxied, caplog):
    """Of the prompt, of the answer, of a stream before its first token: told, tried once, and no engine is blamed."""
    long, chat = {**body(4000), "prompt": prompt(4000)}, {"messages": [{"role": "user", "content": "x y " * 1500}]}
    for proxy in (scene(style=style), proxied(style=style, decode=engines[1:])):
        for wish in ({**long, "deadline_ms": 1}, {**long, "deadline_ms": 10}, body(4000, deadline_ms=200)):
            answer = proxy.ask(**wish)
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
            answer = proxy.ask(**wish, stream=True)
            assert answer.status_code in (200, 408)
            assert '"code":"deadline_exceeded"' in answer.text.strip().splitlines()[-1]
        answer = proxy.http.post("/v1/chat/completions", json={**chat, "stream": True, "deadline_ms": 1})
        assert '"code":"deadline_exceeded"' in answer.text.strip().splitlines()[-1]
        proxy.ended({"refused": 7})
        assert proxy.count("retries", side="decode") == proxy.count("retries", side="prefill") == 0
        assert proxy.ready() >= {engine.url for engine in engines[1:]}
    assert not [line for line in caplog.messages if "is looked at" in line]


def test_what_the_proxy_refuses_itself(scene):
    proxy = scene(max_body_bytes=2048)
    answer = proxy.ask(**body(metadata={"kv_from": "10.0.0.1:80"}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata.kv_from")
    assert "x-request-id" in answer.headers
    assert proxy.http.post("/v1/completions", content=b"{").json()["error"]["param"] == "body"
    assert proxy.ask(prompt="x" * 4096).status_code == 413
    assert proxy.http.get("/v1/completions").status_code == 405
    assert proxy.http.post("/v1/nothing").json()["error"]["code"] == "not_found"


def test_models_and_version_are_there(scene, engines):
    proxy = scene()
    assert proxy.http.get("/v1/models").json()["data"][0]["max_model_len"] == 8192
    assert proxy.http.get("/v1/models/sim").json() == engines[1].http.get("/v1/models/sim").json()
    assert proxy.http.get("/v1/models/gpt-4").status_code == 404
    plain = http.client.HTTPConnection(proxy.http.base_url.host, proxy.http.base_url.port, timeout=60)
    plain.request("GET", "/v1/models/../engine")  # as it is, dots and all
    assert plain.getresponse().status == 404
    plain.close()
    assert proxy.http.get("/version").json()["version"]


def test_a_common_beginning_goes_to_one_engine(scene):
    proxy = scene()
    shared = prompt(400)
    for _ in range(4):
        proxy.ask(prompt=[*shared, *prompt(50)], max_tokens=2).raise_for_status()
    assert proxy.count("choices", side="decode", by="prefix") == 3
    assert proxy.count("choices", side="prefill", by="prefix") == 3


def test_keys(engines, proxied, wait_for):
    open_to = {"authorization": "Bearer client"}
    proxy = proxied(decode=engines[1:], api_key="client")
    assert proxy.ask(**body()).status_code == 401
    assert proxy.http.get("/v1/models").status_code == 401
    assert proxy.http.get("/health").status_code == 200
    assert proxy.http.post("/v1/completions", json=body(), headers=open_to).status_code == 200
    keyless = proxied(decode=engines[1:], backend_api_key=None, ready=False)
    told = wait_for(
        lambda: [c for d in keyless.health()["decode"] if "key" in (c := d["cause"] or "")], "nothing is told"
    )
    assert told[0] == "it wants another key: give its own with --backend-api-key"
    answer = keyless.http.post("/v1/completions", json=body(), headers={"authorization": f"Bearer {engines[0].key}"})
    assert answer.status_code == 503, "a client's key is the proxy's, and goes no further"


# ---- engines that answer, and fail


def test_a_client_that_leaves_ends_its_request_everywhere(scene, engines):
    proxy = scene()
    with proxy.stream(**body(4000)) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    with pytest.raises(httpx.TimeoutException):
        proxy.http.post("/v1/completions", json=body(4000), timeout=0.5)
    proxy.ended({"left": 2})
    for engine in engines:
        engine.idle()


def test_a_client_that_leaves_while_its_prompt_is_computed(scene, engines, frozen):
    proxy, giver = scene(peer_timeout=30.0), engines[0]
    frozen(giver)
    with pytest.raises(httpx.TimeoutException):
        proxy.http.post("/v1/completions", json=body(4000), timeout=0.5)
    proxy.ended({"left": 1})
    giver.signal(signal.SIGCONT)
    giver.idle()


def test_killed_before_the_first_byte_another_answers(scene, engines, frozen, wait_for):
    proxy, giver, taker = scene(policy="round-robin", peer_timeout=30.0), *engines[:2]
    wish = body(stream=True)
    frozen(taker)  # it says nothing any more, and then it dies
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(proxy.ask, **wish)
        wait_for(lambda: proxy.health()["decode"][0]["open"], "it was not asked")
        taker.kill()
        answer = asked.result()
    assert answer.status_code == 200
    alone = giver.http.post("/v1/completions", json=wish).content
    assert said(answer.content) == said(alone) != ""
    assert proxy.count("retries", side="decode") == 1
    proxy.ended({"answered": 1})
    assert proxy.ready() == {giver.url, engines[2].url}


@pytest.mark.parametrize("style", STYLES)
def test_silent_before_the_first_byte_another_answers_and_it_comes_back(style, scene, engines, frozen, wait_for):
    proxy, taker = scene(style=style, policy="round-robin", peer_timeout=3.0), engines[1]
    frozen(taker)
    answer = proxy.ask(**body()).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 8
    assert proxy.count("retries", side="decode") == 1
    cause = proxy.health()["decode"][0]["cause"]
    assert cause == "it has said nothing for 3 s"
    taker.signal(signal.SIGCONT)
    wait_for(lambda: taker.url in proxy.ready(), "it is not taken back")


def test_killed_after_the_first_byte_the_stream_ends_with_an_error(scene, engines):
    proxy, taker = scene(policy="round-robin"), engines[1]
    with proxy.stream(**body(4000)) as answer:
        events = (line for line in answer.iter_lines() if line)
        first = json.loads(next(events).removeprefix("data: "))
        taker.kill()
        last = [first, *(json.loads(line.removeprefix("data: ")) for line in events)][-1]
    assert text(first)
    assert last["error"]["type"] == "server_error"
    assert f"decode engine {taker.url} broke off" in last["error"]["message"]
    proxy.ended({"broken": 1})
    assert proxy.ask(**body()).status_code == 200, "others go on"


def test_tries_are_bounded(scene, engines, frozen):
    """No retries: a request whose engine is gone is not asked for elsewhere."""
    proxy, taker = scene(retries=0, policy="round-robin", peer_timeout=3.0), engines[1]
    frozen(taker)
    answer = proxy.ask(**body())
    assert answer.status_code == 503
    assert f"{taker.url} is not heard of any more" in answer.json()["error"]["message"]
    assert proxy.count("retries", side="decode") == 0


# ---- engines for prompts that fail


@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_that_hangs_costs_a_bounded_time(style, scene, engines, frozen):
    proxy, giver = scene(style=style, prefill_timeout=1.0, peer_timeout=30.0), engines[0]
    wishes = [body() for _ in range(3)]
    frozen(giver)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda wish: proxy.ask(**wish).raise_for_status().json(), wishes))
    giver.signal(signal.SIGCONT)
    assert [text(answer) for answer in answers] == [text(giver.ask(**wish)) for wish in wishes]
    proxy.ended({"answered": 3})


def test_without_an_engine_for_prompts(scene, engines, wait_for):
    """The other one computes them, or nobody answers, as told."""
    giver = engines[0]
    lenient, strict = ([scene(style=style, prefill_required=must) for style in STYLES] for must in (False, True))
    wishes = [body() for _ in STYLES]
    for proxy in strict:
        assert proxy.ask(**body()).status_code == 200
        assert proxy.ask(prompt=[1], max_tokens=-1).status_code == 400
    giver.kill()
    answers = [proxy.ask(**wish).raise_for_status().json() for proxy, wish in zip(lenient, wishes, strict=True)]
    for proxy in lenient:
        wait_for(lambda proxy=proxy: giver.url not in proxy.ready(), "that it is gone is not seen")
        health = proxy.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert proxy.ask(**body()).status_code == 200
        assert proxy.count("pairings", how="alone") >= 1
    for proxy in strict:
        for _ in range(2):
            answer = proxy.ask(**body())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "no prefill engine is ready" in answer.json()["error"]["message"]
        wait_for(lambda proxy=proxy: proxy.http.get("/health").status_code == 503, "health says otherwise")
    giver.start()
    for proxy, wish, answer in zip(lenient, wishes, answers, strict=True):
        assert text(answer) == text(giver.ask(**wish))
        wait_for(lambda proxy=proxy: giver.url in proxy.ready(), "it is not found again")
        before = proxy.count("pairings", how="handed")
        assert text(proxy.ask(**wish).json()) == text(answer)
        assert proxy.count("pairings", how="handed") == before + 1


def test_who_waits_for_a_prompt_in_vain_is_asked_anew(scene, engines, frozen, wait_for):
    """Both at once, and the prompt fails while the other engine has not begun to answer."""
    giver, taker, _ = engines
    proxy = scene(decode=[taker], style="sglang", prefill_timeout=1.0, peer_timeout=30.0)
    frozen(giver)
    frozen(taker)
    wish = body()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(proxy.ask, **wish)
        wait_for(lambda: proxy.count("pairings", how="alone"), "it was not asked anew")
        giver.signal(signal.SIGCONT)
        taker.signal(signal.SIGCONT)
        answer = asked.result().raise_for_status().json()
    assert text(answer) == text(giver.ask(**wish))
    assert proxy.count("pairings", how="handed") == 1
    assert proxy.count("retries", side="decode") == 0
    proxy.ended({"answered": 1})


# ---- engines that come back as others


def test_gone_and_started_anew_as_another(scene, engines, proxied, wait_for, caplog):
    """It is found again on its port. With other weights it answers, but nobody hands it KV."""
    proxy, giver, taker = scene(), *engines[:2]
    alone = proxied(prefill=[giver], decode=[taker])
    before = proxy.health()["decode"][0]["fingerprint"]
    taker.kill()
    for _ in range(2):  # also before that it is gone has been seen
        answer = alone.ask(**body())
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "no_engine"
        assert taker.url in answer.json()["error"]["message"]
        wait_for(lambda: taker.url not in alone.ready(), "that it is gone is not seen")
    assert alone.http.get("/health").status_code == alone.http.get("/v1/models").status_code == 503
    alone.ended({"unavailable": 2})

    wait_for(lambda: taker.url not in proxy.ready(), "that it is gone is not seen")
    taker.start({"vocab_size": 1000}, max_waiting=2, max_running=1, queue_timeout=4.0)
    wait_for(lambda: taker.url in proxy.ready(), "it is not found again")
    health = proxy.health()
    assert (before, health["decode"][0]["fingerprint"]) == ("sim-49152", "sim-1000")
    assert health["unpaired"] == [f"fingerprint is 'sim-49152' at {giver.url} and 'sim-1000' at {taker.url}"]
    for _ in range(4):
        assert cached(proxy.ask(**body()).json()) == 96, "who can take over is asked"
    assert proxy.count("pairings", how="handed") == 4
    wait_for(lambda: taker.url in alone.ready(), "it is not found again")
    assert cached(alone.ask(prompt=[1] * 100, max_tokens=2).json()) == 0, "it computes alone"
    caplog.clear()
    full_queue(alone, taker)
    assert not [line for line in caplog.messages if "is looked at" in line]
    taker.kill()


def full_queue(proxy, taker):
    """429 and a wait that took too long are told as the engine told them, and are no fault of its own: it gets the next
    request."""
    small = {"prompt": [1, 2, 3], "max_tokens": 4000}
    with proxy.stream(**small) as running, ThreadPoolExecutor(2) as pool:
        lines = running.iter_lines()
        next(lines)
        waiting = [pool.submit(proxy.ask, **{**small, "max_tokens": 2, "stream": stream}) for stream in (False, True)]
        taker.served.wait_for("the others have not come", lambda books: books.open == 3)
        answer = proxy.ask(**small)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert taker.url in proxy.ready()
        for late in (one.result() for one in waiting):
            assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
            assert int(late.headers["retry-after"]) >= 1
        assert taker.url in proxy.ready()
        lines.close()
        running.close()
        assert proxy.ask(**{**small, "max_tokens": 2}).status_code == 200
