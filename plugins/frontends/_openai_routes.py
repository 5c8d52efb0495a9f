"""The endpoints: read, check, submit, answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from engine.core.keys import Keys
from engine.core.outputs import Chunk, Completion
from engine.core.protocols import ToolParser
from engine.core.serve.client import AsyncEngine
from engine.core.serve.streams import Gather, Group, embedded
from engine.plugins.frontends._cache_routes import CacheRoutes
from engine.plugins.frontends._dashboard import Dashboard
from engine.plugins.frontends._debug_routes import DebugRoutes
from engine.plugins.frontends._endpoints import Endpoints, id_of, tenant_of
from engine.plugins.frontends._errors import HTTPError, failed, too_late
from engine.plugins.frontends._life import Life
from engine.plugins.frontends._metrics import Metrics
from engine.plugins.frontends._openai_answers import Answers, ChatAnswers
from engine.plugins.frontends._openai_docs import describe
from engine.plugins.frontends._openai_embeddings import EmbeddingRequest, answer, told_of_input
from engine.plugins.frontends._openai_fields import cut
from engine.plugins.frontends._openai_jobs import Job, Preparer
from engine.plugins.frontends._openai_response_events import ResponseEvents
from engine.plugins.frontends._openai_responses import ResponsesRequest
from engine.plugins.frontends._openai_schema import ChatRequest, CompletionRequest, Sampling
from engine.plugins.frontends._openai_tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    rendered,
    tokenize,
)
from engine.plugins.frontends._server_routes import ServerRoutes
from engine.plugins.frontends._watched import Watched, log_prompts
from engine.plugins.frontends._wire import EventStream, json_response, until_gone
from engine.plugins.frontends._written import InPieces

Pieces = AsyncGenerator[tuple[int, Chunk], None]
"""Which choice, and what is new of it."""


class Routes(Endpoints):
    """The OpenAI interface of one engine."""

    def __init__(
        self,
        engine: AsyncEngine,
        parser: ToolParser,
        *,
        name: str,
        keys: Keys | None,
        max_body_bytes: int,
        max_body_parts: int,
        slow_reader_s: float,
        open_paths: Sequence[str] = (),
        dashboard: bool = False,
    ) -> None:
        limits = engine.limits
        super().__init__(
            keys=keys, max_body_bytes=max_body_bytes, max_parts=max(max_body_parts, limits.max_open),
            max_elements=max(limits.max_model_len, limits.max_waiting_tokens) + max_body_parts, open_paths=open_paths,
            patience=slow_reader_s,
        )  # fmt: skip
        self.engine = engine
        self.name = name
        self.metrics = Metrics()
        self.life = Life(engine, engine.config.progress_timeout)
        self._names = {name, engine.config.model, engine.model.name}
        self._created = int(time.time())
        self._preparer = Preparer(engine, name, self._check_model, parser)
        self._dashboard = Dashboard(engine, name=name, keys=keys, life=self.life.describe) if dashboard else None

    def app(self) -> FastAPI:
        """The ASGI application."""
        config = self.engine.config
        cache = CacheRoutes(self.engine, read=self.read, failure=self.failure)
        server = ServerRoutes(self.engine, name=self.name, life=self.life, metrics=self.metrics)
        routes = (
            ("/v1/chat/completions", "POST", self.chat, True),
            ("/v1/completions", "POST", self.completions, True),
            ("/v1/responses", "POST", self.responses, True),
            ("/v1/embeddings", "POST", self.embeddings, True),
            ("/v1/chat/completions/render", "POST", self.render_chat, True),
            ("/v1/completions/render", "POST", self.render_completions, True),
            ("/tokenize", "POST", self.tokenize, True),
            ("/detokenize", "POST", self.detokenize, True),
            ("/v1/models", "GET", self.models, True),
            ("/v1/models/{name:path}", "GET", self.model, True),
            *server.routes(),
            ("/version", "GET", self.version, True),
            *cache.routes(),
            *DebugRoutes(self.engine, read=self.read).routes(),
        )
        app = self.build("Sixhooks", routes, origins=config.cors_origin)
        app.add_middleware(
            Watched, life=self.life, answered=self.metrics.answered, patience=self._patience, log=config.log_requests
        )
        unguarded = {path for path, _, _, guarded in routes if not guarded}
        if self._dashboard is not None:
            self._dashboard.mount(app)
        open_paths = None if self._keys is None else {*unguarded, *self._open_paths}
        describe(app, self.engine.limits, self.engine.model.hidden_size, open_paths)
        return app

    async def __aenter__(self) -> Routes:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The server is gone: so is its dashboard."""
        if self._dashboard is not None:
            await self._dashboard.close()

    # ---- endpoints

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._generate(request, ChatRequest, ChatAnswers)

    async def completions(self, request: Request) -> Response:
        """Continue text or token ids."""
        return await self._generate(request, CompletionRequest, Answers)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, as items. Nothing is stored."""

        def work(body: bytes) -> tuple[ResponsesRequest, Job]:
            asked, job = self._preparer.prepare_response(body, id_of(request))
            return asked, self._whose(request, job)

        asked, job = await self.read(request, work)
        events = ResponseEvents(self.name, asked, job.wish, self.engine.tokenizer)
        return await self._answer(
            request,
            job,
            told=lambda _, pieces: events.told((chunk async for _, chunk in pieces), self.failure, self.aside),
            whole=lambda completions: events.whole(*completions),
        )

    async def embeddings(self, request: Request) -> Response:
        """Texts or token ids as vectors."""

        def work(body: bytes) -> tuple[EmbeddingRequest, Job]:
            asked, job = self._preparer.prepare_embeddings(body, id_of(request))
            return asked, self._whose(request, job)

        asked, job = await self.read(request, work)
        with told_of_input():
            group = await self._submitted(job)
            count = len(group.streams)
            try:
                ends = await until_gone(request.receive, self._collect(count, self._follow(group)))
            finally:
                group.abort()
        found = [embedded(stream, end) for stream, end in zip(group.streams, ends, strict=True)]
        return await answer(self.name, asked, found, self.aside, headers={"x-request-id": id_of(request)})

    async def render_chat(self, request: Request) -> Response:
        """The exact prompt, text and ids, that a conversation becomes. Nothing is computed."""
        return await self._rendered(request, ChatRequest)

    async def render_completions(self, request: Request) -> Response:
        """The exact prompts, text and ids, of a completion request. Nothing is computed."""
        return await self._rendered(request, CompletionRequest)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""

        def work(body: bytes) -> Response:
            wish = TokenizeRequest.parse(body, self._preparer.most)
            self._check_model(wish.model or self.name)
            return json_response(tokenize(self.engine, wish, self._preparer.parser))

        return await self.read(request, work)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""

        def work(body: bytes) -> Response:
            wish = DetokenizeRequest.parse(body, self._preparer.most)
            self._check_model(wish.model or self.name)
            return json_response(detokenize(self.engine, wish))

        return await self.read(request, work)

    async def models(self, request: Request) -> Response:
        """The served model, with the length limit that is enforced and the tokens that the whole KV pool holds."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """One model."""
        self._check_model(request.path_params["name"])
        return json_response(self._model_card())

    # ---- generation

    async def _generate(self, request: Request, schema: type[Sampling], shape: type[Answers]) -> Response:
        job = await self._prepared(request, schema)
        answers = shape(self.name, job.wish, self.engine.tokenizer)
        return await self._answer(
            request, job, told=lambda count, pieces: self._events(count, pieces, answers), whole=answers.whole
        )

    async def _answer(
        self,
        request: Request,
        job: Job,
        *,
        told: Callable[[int, Pieces], AsyncIterator[dict[str, Any] | str]],
        whole: Callable[[list[Completion]], dict[str, Any]],
    ) -> Response:
        """Submit a job and answer it.

        Args:
            told: a stream's events, of so many choices and their pieces.
            whole: the answer that is no stream, of all choices.
        """
        headers = {"x-request-id": id_of(request)}
        group = await self._submitted(job)
        count, pieces = len(group.streams), self._follow(group)
        if job.stream:
            if job.settles_late:
                pieces = await self._begun(request, group, pieces)
            return EventStream(told(count, pieces), group.abort, headers=headers)
        try:
            completions = await until_gone(request.receive, self._collect(count, pieces))
        finally:
            group.abort()

        def build() -> Response:
            response = InPieces(whole(completions), headers)
            for gone in (completions, job.asks):
                while gone:  # one after the other, and here: all at once, where this ends, would take long
                    gone.pop()
            return response

        return await self.aside.build(completions, build)

    async def _begun(self, request: Request, group: Group, pieces: Pieces) -> Pieces:
        """Wait for the first piece: what was refused before that is no stream but an answer of its own."""
        try:
            first = await until_gone(request.receive, anext(pieces))
        except BaseException:
            group.abort()
            raise

        async def all_of_them() -> Pieces:
            yield first
            async for piece in pieces:
                yield piece

        return all_of_them()

    async def _rendered(self, request: Request, schema: type[Sampling]) -> Response:
        def work(body: bytes) -> Response:
            job = self._preparer.prepare(body, schema, id_of(request))
            self._log_prompts(request, job)
            return json_response(rendered(self.engine, job))

        return await self.read(request, work)

    async def _prepared(self, request: Request, schema: type[Sampling]) -> Job:
        def work(body: bytes) -> Job:
            return self._whose(request, self._preparer.prepare(body, schema, id_of(request)))

        return await self.read(request, work)

    async def _submitted(self, job: Job) -> Group:
        """A job's requests, accepted; what there is to make of many is made in a thread. Raises as ``submit_many``."""
        if job.much:
            return await self.engine.submit_aside(job.asks, self.aside.run)
        return self.engine.submit_many(job.asks, checked=True)

    def _whose(self, request: Request, job: Job) -> Job:
        """The job with who asks for it; its prompts are logged, if that was asked for."""
        self._log_prompts(request, job)
        return job.of(tenant_of(request), request.headers.get("traceparent", ""))

    def _log_prompts(self, request: Request, job: Job) -> None:
        if self.engine.config.log_prompts:
            log_prompts(id_of(request), job.texts, [ask.tokens for ask in job.asks])

    async def _collect(self, count: int, pieces: Pieces) -> list[Completion]:
        """All choices to their end. Raises ``HTTPError`` where the engine gave up on one."""
        gathers = [Gather() for _ in range(count)]
        found: dict[int, Completion] = {}
        async for index, chunk in pieces:
            completion = gathers[index].add(chunk)
            if completion is not None:
                found[index] = completion
        return [found[index] for index in range(count)]

    async def _follow(self, group: Group) -> Pieces:
        """Pieces as they come. Raises ``HTTPError`` where the engine gave up on a choice."""
        async for index, chunk in group:
            if chunk.finish_reason == "error":
                raise failed(chunk.detail)
            if chunk.finish_reason == "timeout":
                raise too_late(chunk.detail, self.engine.ledger.ends.wait_for(1))
            yield index, chunk

    async def _events(self, count: int, pieces: Pieces, answers: Answers) -> AsyncIterator[dict[str, Any] | str]:
        """A stream's events. An error in the middle is its last event.

        Nothing is told before there is a token: clients take the first event for it, and measure by that.
        """
        ends: dict[int, Chunk] = {}
        openings = answers.openings(count)
        try:
            async for index, chunk in pieces:
                while openings:
                    yield openings.pop(0)
                if chunk.finish_reason is not None:  # what the last pieces bring is not kept until the last of all
                    ends[index] = replace(chunk, text="", token_ids=(), logprobs=(), prompt_logprobs=None)
                if chunk.text or chunk.logprobs or chunk.finish_reason is not None:
                    event = await self.aside.build([chunk], partial(answers.piece, index, chunk))
                    if event is not None:
                        yield event
        except Exception as error:
            yield self.failure(error).body()
            return
        last = answers.last([ends[index] for index in range(count)])
        if last is not None:
            yield last
        yield "[DONE]"

    # ---- around every endpoint

    def failure(self, error: Exception) -> HTTPError:
        """As everywhere; counted, also where it is the last event of a stream."""
        failure = super().failure(error)
        self.metrics.errors[str(failure.status)] += 1
        return failure

    def check_accepts(self) -> None:
        """Nothing new while the server drains."""
        self.life.check_accepts()

    def _check_model(self, name: str) -> None:
        if name not in self._names:
            raise HTTPError(
                404,
                f"model {cut(name)!r} is not served here; {self.name!r} is",
                "not_found_error",
                "model",
                "model_not_found",
            )

    def _model_card(self) -> dict[str, Any]:
        limits = self.engine.limits
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "sixhooks",
            "max_model_len": limits.max_model_len,
            "kv_pool_tokens": limits.pool_tokens,
        }
