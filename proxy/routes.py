"""The proxy's endpoints."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.core.keys import Keys
from engine.plugins.frontends._endpoints import PROMETHEUS, Endpoints, id_of
from engine.plugins.frontends._errors import HTTPError, as_http
from engine.plugins.frontends._wire import ClientGone, json_response, until_gone
from engine.proxy.bodies import Wish
from engine.proxy.choosing import Chooser
from engine.proxy.fleet import Fleet, none_ready
from engine.proxy.metrics import Metrics
from engine.proxy.options import ProxyOptions
from engine.proxy.outlet import Outlet, SlowReader
from engine.proxy.relay import Relay, unavailable

log = logging.getLogger("engine.proxy")


class Routes(Endpoints):
    """The OpenAI interface of a fleet."""

    def __init__(self, options: ProxyOptions, fleet: Fleet) -> None:
        keys = None if options.api_key is None else Keys([options.api_key])
        super().__init__(keys=keys, max_body_bytes=options.max_body_bytes, patience=options.slow_reader)
        self.options, self.fleet = options, fleet
        self.metrics = Metrics(fleet)
        self.relay = Relay(options, fleet, Chooser(options), self.metrics)

    def app(self) -> FastAPI:
        """The ASGI application."""
        routes = (
            ("/v1/chat/completions", "POST", self.generate, True),
            ("/v1/completions", "POST", self.generate, True),
            ("/v1/responses", "POST", self.generate, True),
            ("/v1/embeddings", "POST", self.generate, True),
            ("/v1/models", "GET", self.models, True),
            ("/v1/models/{name:path}", "GET", self.models, True),
            ("/health", "GET", self.health, False),
            ("/metrics", "GET", self.scrape, False),
            ("/version", "GET", self.version, False),
        )
        return self.build("Sixhooks proxy", routes)

    async def generate(self, request: Request) -> Response:
        """A completion of text or of a conversation, a response, or embeddings."""
        path = str(request.scope["path"])
        wish = await self.read(request, lambda body: Wish.parse(path, body))
        return Relayed(self, wish, id_of(request))

    async def models(self, request: Request) -> Response:
        """What the engines that answer say of their model."""
        path = asked_path(str(request.scope["path"]))
        for peer in [peer for peer in self.fleet.decode if peer.ready]:
            try:
                answer = await self.fleet.client.get(peer.url + path, timeout=self.options.peer_timeout)
            except httpx.HTTPError as error:
                peer.suspect(f"cannot be asked: {error}")
                continue
            return Response(answer.content, answer.status_code, media_type="application/json")
        raise unavailable(none_ready("decode", self.fleet.decode))

    async def health(self, request: Request) -> Response:
        """200 while requests can be answered, else 503; every engine with its state, and who cannot be paired."""
        fleet, cause = self.fleet, None
        if not any(peer.ready for peer in fleet.decode):
            cause = none_ready("decode", fleet.decode)
        elif fleet.prefill and not fleet.givers():
            cause = none_ready("prefill", [peer for peer in fleet.prefill if not peer.ready])
        able = cause is None or (not self.options.prefill_required and any(peer.ready for peer in fleet.decode))
        status = "ok" if cause is None else "degraded" if able else "not ready"
        body = {"status": status, "cause": cause, **fleet.describe(), "unpaired": fleet.problems()}
        return json_response(body, 200 if able else 503)

    async def scrape(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self.metrics.render(), media_type=PROMETHEUS)

    # ---- around every endpoint

    def refused(self, request: Request, failure: HTTPError) -> None:
        """Count it by whose fault it is."""
        if request.method == "POST":
            self.metrics.ended("refused" if failure.status < 500 else "failed")

    def left(self) -> None:
        """Count it."""
        self.metrics.ended("left")


def asked_path(path: str) -> str:
    """A path as engines are asked for it, with the proxy's own key: it leads nowhere else. Raises ``HTTPError`` 404."""
    if {".", ".."} & set(path.split("/")):
        raise HTTPError(404, f"there is no model {path!r}", code="model_not_found")
    return quote(path)


class Relayed(Response):
    """An answer that is fetched while it is sent. A client that leaves ends what it had begun on all engines."""

    def __init__(self, routes: Routes, wish: Wish, request_id: str) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._routes, self._wish, self._id = routes, wish, request_id
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Fetch and send."""
        metrics = self._routes.metrics
        out = Outlet(send, self._id, self._routes.options.slow_reader, metrics.first_byte.observe)
        outcome = "failed"

        async def leaving() -> Message:
            """As ``receive``, but after its last piece nobody leaves an answer, though the server says so."""
            message = await receive()
            if out.ended:
                await asyncio.get_running_loop().create_future()
            return message

        try:
            outcome = await until_gone(leaving, self._fetch(out))
        except (ClientGone, SlowReader):
            outcome = "left"
        finally:
            metrics.ended(outcome)

    async def _fetch(self, out: Outlet) -> str:
        headers: dict[str, Any] = {"content-type": "application/json", "x-request-id": self._id}
        try:
            return await self._routes.relay.serve(self._wish, headers, out)
        except SlowReader:
            raise
        except Exception as error:
            log.error("a request failed", exc_info=error)
            await out.fail(as_http(error))
            return "failed"
