"""Servers as targets: what they say is timed and counted, and their failures are told apart."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from engine import AsyncEngine, EngineConfig
from engine.core.errors import ConfigError, EngineError
from engine.core.keys import Keys
from engine.lab import SLO, Arrival, Piece, Results, Workload, drive, workload
from engine.lab.driving import warm
from engine.lab.endpoint import Endpoint, EndpointTarget
from engine.lab.jobs import reseeded
from engine.lab.wording import worded
from engine.plugins.frontends._server import bind, url_of
from engine.plugins.frontends.openai import OpenAIFrontend


class Serving:
    """An application on a free port, in a thread."""

    def __init__(self, app) -> None:
        sock = bind("127.0.0.1", 0)
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self.url, self._server = url_of(sock), uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([sock],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(text="", reason=None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def usage(tokens: int) -> dict:
    return {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}


class Foreign:
    """A server of somebody else, which does with each request what ``max_tokens`` says."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.clients: set = set()
        self.app = Starlette(routes=[
            Route("/v1/models", self.models), Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ])  # fmt: skip

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "some-model", "owned_by": "acme"}, {"id": "other", "owned_by": "acme"}]})

    async def complete(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        self.clients.add(request.client)
        kind = body["max_tokens"]
        if kind in (429, 503, 500, 418):
            return JSONResponse({"error": {"message": f"no {kind}"}}, status_code=kind)
        return StreamingResponse(self.stream(kind), media_type="text/event-stream")

    async def stream(self, kind: int):
        yield b": ping\n\n"
        if kind == 1:  # ends, and says nothing
            yield event(**choice("", "stop"))
            yield event(choices=[], usage={"prompt_tokens": 4, "completion_tokens": 0})
            yield b"data: [DONE]\n\n"
            return
        yield event(**choice("a b c"))
        if kind == 2:  # cut
            return
        if kind == 3:  # hangs
            await asyncio.sleep(60)
        if kind == 4:
            yield event(error={"message": "out of luck", "code": "bad_luck"})
            return
        if kind == 5:
            yield b"data: {nonsense\n\n"
            return
        if kind == 6:  # three tokens a chunk
            yield event(**choice("d e f", "length"))
            yield event(**usage(6))
        else:  # one, and the end comes by itself
            yield event(**choice("d"))
            yield event(**choice("", "length"))
            yield event(**usage(2))
        yield b"data: [DONE]\n\n"

    async def chat(self, request: Request):
        self.bodies.append(await request.json())

        async def stream():
            yield event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            yield event(choices=[{"delta": {"content": "hello"}, "finish_reason": None}])
            yield event(choices=[{"delta": {"content": " you"}, "finish_reason": "stop"}])
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def foreign():
    server = Foreign()
    serving = Serving(server.app)
    server.url = serving.url
    yield server
    serving.close()


@pytest.fixture(scope="module")
def ours():
    """Ours, with a key, and the default model's tokenizer."""
    config = EngineConfig.model_validate({"executor": "sim", "page_size": 4, "max_running": 4, "max_waiting": 20})
    engine = AsyncEngine.launch(config, in_process=True)
    frontend = OpenAIFrontend()
    frontend.guard(Keys(["sesame"]))
    serving = Serving(frontend.app(engine))
    yield serving.url
    serving.close()
    engine.shutdown()


def driven(endpoint, made, warm_up=0):
    async def run():
        async with EndpointTarget(endpoint) as target:
            await warm(target, made, warm_up)
            return await drive(target, made)

    return asyncio.run(run())


def asked(*outputs: int) -> Workload:
    return Workload([Arrival(f"r{n}", 0.0, (Piece(n, 4),), output) for n, output in enumerate(outputs)])


def test_failures_are_told_apart_and_never_good(foreign):
    endpoint = Endpoint.find(foreign.url + "/v1", vocab=1000, timeout=2.0)
    made = asked(429, 503, 500, 418, 1, 2, 3, 4, 5, 6)
    found = {one.id: one for one in driven(endpoint, made).requests}
    ends = [found[f"r{n}"].finish for n in range(10)]
    assert ends == ["refused", "refused", "http-500", "http-418", "empty", "cut", "timeout", "error", "cut", "length"]
    assert "no 429" in found["r0"].detail
    assert "bad_luck" in found["r7"].detail
    assert [one.id for one in found.values() if SLO().kept(one)] == ["r9"]


def test_tokens_are_counted_by_usage_and_gaps_by_chunks(foreign):
    result = driven(Endpoint.find(foreign.url, vocab=1000), asked(6))
    [one] = result.requests
    assert (one.prompt, one.output, len(result.gaps)) == (4, 6, 1), "two chunks of three tokens"
    assert one.tpot == pytest.approx(float(result.gaps[0]) / 5, rel=1e-3)
    assert result.client.tokens_a_chunk == 3
    result = driven(Endpoint.find(foreign.url, vocab=1000), asked(7))
    assert (result.requests[0].output, len(result.gaps)) == (2, 1), "a bare end is no token"


def test_connections_are_used_again(foreign):
    """An answer that is not read to its end costs its connection, and the server a new one."""
    before = len(foreign.clients)
    driven(Endpoint.find(foreign.url, vocab=1000), workload("constant:rate=20,requests=10,prompt=4,output=7"))
    assert len(foreign.clients) - before < 8


def test_what_is_sent_to_strangers(foreign):
    made = Workload([Arrival("r", 0.0, (Piece(1, 4),), 9, tenant="t", deadline=50.0)])
    driven(Endpoint.find(foreign.url, vocab=5000, model="other", extra={"ignore_eos": True, "temperature": None}), made)
    body = foreign.bodies[-1]
    assert set(body) == {"model", "prompt", "max_tokens", "stream", "stream_options", "ignore_eos"}
    assert body["model"] == "other"
    assert all(100 <= token < 5000 for token in body["prompt"])


def test_turns_of_a_chat_are_messages(foreign):
    made = Workload([
        Arrival("a", 0.0, (Piece(1, 5),), 9),
        Arrival("b", 0.0, (Piece(2, 3),), 9, after=("a",), continues="a"),
    ])  # fmt: skip
    result = driven(Endpoint.find(foreign.url, chat=True), made)
    assert [one.finish for one in result.requests] == ["stop", "stop"]
    assert all(one.output == 2 and len(one.id) for one in result.requests), "an opening is no token"
    first, said, second = foreign.bodies[-1]["messages"]
    assert (first["content"], said, second["content"]) == (
        worded([Piece(1, 5)]), {"role": "assistant", "content": "hello you"}, worded([Piece(2, 3)])
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "--vocab-size"), ({"vocab": 9, "model": "that"}, "no model 'that'; it has 'some-model', 'other'")],
)
def test_what_nobody_knows_is_asked_for(foreign, more, words):
    with pytest.raises(ConfigError, match=words):
        Endpoint.find(foreign.url, **more)


def test_answers_without_token_ids_cannot_be_continued(foreign):
    endpoint = Endpoint.find(foreign.url, vocab=1000)
    with pytest.raises(ConfigError, match="--tokenizer"):
        endpoint.check(workload("conversations:rate=1,sessions=1,turns=2"))


@pytest.mark.parametrize("url", ["ftp://here", "http://", "http://127.0.0.1:x"])
def test_no_url(url):
    with pytest.raises(ConfigError, match="no URL"):
        Endpoint.find(url)


def test_nobody_there():
    with pytest.raises(EngineError, match="no server answers"):
        Endpoint.find("http://127.0.0.1:1")


def test_who_dies_is_unreachable():
    server = Foreign()
    serving = Serving(server.app)
    endpoint = Endpoint.find(serving.url, vocab=1000)
    serving.close()
    [one] = driven(endpoint, asked(7)).requests
    assert one.finish == "unreachable"


def test_ours_tells_its_vocabulary_and_turns_follow_real_answers(ours):
    endpoint = Endpoint.find(ours, api_key="sesame")
    assert (endpoint.owner, endpoint.vocab, endpoint.tokenizes) == ("sixhooks", 49152, True)
    made = workload("conversations:rate=20,sessions=3,turns=3,prompt=30,output=8,pause=0.01,system=40")
    endpoint.check(made)
    result = driven(endpoint, made, warm_up=2)
    found = {one.id: one for one in result.requests}
    assert all(one.finish == "length" and one.output == 8 for one in found.values())
    for one in made:
        if one.continues:
            before = found[one.continues]
            assert found[one.id].prompt > before.prompt + one.new_tokens, "the answer is in it"
            assert found[one.id].cached >= 4 * ((before.prompt - 1) // 4), "usage tells what was cached"
    results = Results(workload="", requests=result.requests, gaps=result.gaps, seconds=result.seconds, engines=(),
                      wall=0, cpu=0, client=result.client)  # fmt: skip
    summary = results.summary()
    assert summary["preemptions"] is None, "nobody knows"
    assert "steps" not in summary
    assert summary["cached_share"] > 0


def test_ours_refuses_the_overload_and_that_is_counted(ours):
    endpoint = Endpoint.find(ours, api_key="sesame")
    result = driven(endpoint, workload("batch:requests=60,prompt=20,output=200"))
    ends = {one.finish for one in result.requests}
    assert ends == {"length", "refused"}
    assert all("429" in one.detail for one in result.requests if one.finish == "refused")


def test_the_key_is_told_to_nobody_else(ours):
    with pytest.raises(EngineError, match="401"):
        Endpoint.find(ours)
    assert "sesame" not in repr(Endpoint.find(ours, api_key="sesame"))
    assert "sesame" not in str(Endpoint.find(ours, api_key="sesame").describe())


def test_other_tokens_of_the_same_shape():
    made = workload("constant:rate=9,requests=5,prompt=3,prefix=4")
    other = reseeded(made, "x")
    assert [(one.at, one.new_tokens) for one in other] == [(one.at, one.new_tokens) for one in made]
    assert len({one.prompt[0].seed for one in other}) == 1, "a common beginning stays one"
    assert not {p.seed for one in made for p in one.prompt} & {p.seed for one in other for p in one.prompt}
