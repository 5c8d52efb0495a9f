"""Embeddings through the proxy: to engines for prompts, without a hand-off. Stand-ins answer: only the way is tried."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from engine.plugins.frontends._server import Server, bind, url_of

VECTOR = {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]}


class StandIn:
    """Says that it is an engine, and answers ``/v1/embeddings`` with ``status``."""

    def __init__(self, role):
        self.role, self.status, self.asked, self.bodies = role, 200, 0, []
        self._server = None
        self._sock = bind("127.0.0.1", 0)
        self.url = url_of(self._sock)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="stand-in")
        self._thread.start()

    def app(self):
        app = FastAPI()

        @app.get("/v1/engine")
        async def about():
            return {"incarnation": self.url, "role": self.role, "model": "m", "fingerprint": "f", "page_size": 16,
                    "connectors": {}, "health": {"status": "ok"}}  # fmt: skip

        @app.post("/v1/embeddings")
        async def embed(request: Request):
            self.asked += 1
            self.bodies.append(await request.body())
            answer = VECTOR if self.status == 200 else {"error": {"message": "no", "code": "unsupported"}}
            return JSONResponse(answer, self.status)

        return app

    async def _serve(self):
        config = uvicorn.Config(self.app(), log_level="warning", access_log=False, lifespan="off")
        self._server = Server(config)
        await self._server.serve([self._sock])

    def close(self, wait_for):
        wait_for(lambda: self._server is not None, "the stand-in has not begun")
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._sock.close()


@pytest.fixture
def stands(wait_for):
    made = []

    def stand(role):
        made.append(StandIn(role))
        return made[-1]

    yield stand
    for one in made:
        one.close(wait_for)


def embed(proxy, **more):
    return proxy.http.post("/v1/embeddings", json={"input": ["ab", "c"], **more})


def test_engines_for_prompts_take_them_in_turns(stands, proxied):
    prefill, decode = [stands("prefill"), stands("prefill")], [stands("decode")]
    proxy = proxied(prefill=prefill, decode=decode)
    for number in range(6):
        answer = embed(proxy, encoding_format="float", user=f"u{number}")
        assert (answer.status_code, answer.json()) == (200, VECTOR)
    assert Counter(one.asked for one in prefill) == {3: 2}
    assert decode[0].asked == 0
    assert b'"u5"' in b"".join(prefill[0].bodies + prefill[1].bodies)
    assert all(b"kv_" not in body for one in prefill for body in one.bodies)
    assert proxy.count("pairings", how="handed") == proxy.count("pairings", how="alone") == 0
    proxy.ended({"answered": 6})


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_where_there_is_none_an_engine_that_answers_takes_them(style, stands, proxied):
    decode = stands("both")
    proxy = proxied(decode=[decode], style=style)
    assert embed(proxy).json() == VECTOR
    assert decode.asked == 1


def test_who_fails_is_followed_by_another_and_errors_of_requests_are_told(stands, proxied):
    prefill, decode = stands("prefill"), stands("decode")
    prefill.status = 500
    proxy = proxied(prefill=[prefill], decode=[decode])
    assert embed(proxy).json() == VECTOR
    assert (prefill.asked, decode.asked) == (1, 1)
    decode.status = prefill.status = 400
    answer = embed(proxy)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    proxy.ended({"answered": 1, "refused": 1})
