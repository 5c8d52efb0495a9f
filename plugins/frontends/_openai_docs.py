"""``/openapi.json``: what bodies may hold and what comes back. The endpoints read and answer by themselves (bounded,
strict), so FastAPI does not know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from engine.core.protocols import Limits
from engine.plugins.frontends import _openai_shapes as shapes
from engine.plugins.frontends._cache_routes import BODIES as CACHE_BODIES
from engine.plugins.frontends._debug_routes import BODIES as DEBUG_BODIES
from engine.plugins.frontends._endpoints import PROMETHEUS
from engine.plugins.frontends._openai_agree import say_agreements
from engine.plugins.frontends._openai_bounds import say_bounds
from engine.plugins.frontends._openai_embeddings import EmbeddingRequest
from engine.plugins.frontends._openai_fields import Body
from engine.plugins.frontends._openai_responses import ResponsesRequest
from engine.plugins.frontends._openai_schema import ChatRequest, CompletionRequest
from engine.plugins.frontends._openai_tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/completions/render": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": shapes.ChatAnswer,
    "/v1/chat/completions/render": shapes.RenderedAnswer,
    "/v1/completions": shapes.CompletionAnswer,
    "/v1/responses": shapes.ResponseAnswer,
    "/v1/embeddings": shapes.EmbeddingsAnswer,
    "/v1/completions/render": shapes.RenderedAnswer,
    "/tokenize": shapes.TokenizeAnswer,
    "/detokenize": shapes.DetokenizeAnswer,
    "/v1/models": shapes.ModelsAnswer,
    "/v1/models/{name}": shapes.ModelCard,
    "/v1/engine": shapes.EngineAnswer,
    "/health": shapes.HealthAnswer,
    "/health/ready": shapes.HealthAnswer,
    "/health/live": shapes.LiveAnswer,
    "/version": shapes.VersionAnswer,
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WORDS = {
    400: "the request is not valid: which field, and why",
    401: "the API key is missing or wrong",
    404: "there is no such model",
    408: "deadline_ms has passed, or the body does not come",
    409: "not available as this server was started",
    410: "these events are not kept any more",
    413: "the body is too large",
    429: "the queue is full",
    500: "the engine could not go on",
    503: "starting, shutting down, the engine is gone, too many large bodies, or the request waited too long",
}
GENERATION, READS, ASKS = (404, 429, 500, 503), (404, 503), (409, 500, 503)
STATUSES: dict[str, tuple[int, ...]] = {
    "/tokenize": READS,
    "/detokenize": READS,
    "/v1/chat/completions/render": READS,
    "/v1/completions/render": READS,
    "/v1/models/{name}": (404,),
    "/v1/cache/stats": ASKS,
    "/v1/cache/dump": ASKS,
    "/v1/cache/snapshot": ASKS,
    "/v1/cache/events": (400, 410, *ASKS),
    "/v1/cache/explain": ASKS,
    "/v1/cache/flush": ASKS,
    "/debug/requests": ASKS,
    "/debug/requests/{request_id}": (404, *ASKS),
    "/debug/record": ASKS,
    "/debug/record/log": ASKS,
}
"""Beside 200 and 401, and those of ``BODY``. Other endpoints that take a body generate; the rest have no errors of
their own."""

BODY = {400, 408, 413, 503}
"""Of all that take a body."""

QUERIES = {
    "/v1/cache/events": (
        {"name": "epoch", "in": "query", "schema": {"type": "string"}},
        {"name": "from", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}},
    )
}
HEALTH = ("/health", "/health/ready")
TEXT = {"/metrics": PROMETHEUS, "/debug/record/log": "application/jsonl"}
EVENTS = "text/event-stream"
EVENT = {
    "type": "object",
    "description": "one event of the stream; data is JSON, or [DONE] at the end",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
KEY = "key"


def describe(app: FastAPI, limits: Limits, hidden_size: int, open_paths: Collection[str] | None) -> None:
    """Add bodies, answers and errors to the application's OpenAPI document.

    Args:
        limits: that requests obey; the document says them.
        hidden_size: how many numbers an embedding has.
        open_paths: that need no API key; ``None``: none does.
    """

    def openapi() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        _add_bodies(document, schemas, limits)
        say_agreements(schemas, hidden_size)
        refs, found = msgspec.json.schema_components(
            [*ANSWERS.values(), shapes.ErrorAnswer], ref_template="#/components/schemas/{name}"
        )
        schemas.update(found)
        *answers, error = refs
        by_path = dict(zip(ANSWERS, answers, strict=True))
        for path, operations in document["paths"].items():
            guarded = open_paths is not None and path not in open_paths
            for method, operation in operations.items():
                operation["responses"] = _responses(path, method, by_path.get(path, {}), error, guarded)
                operation.setdefault("parameters", []).extend(QUERIES.get(path, ()))
                if guarded:
                    operation["security"] = [{KEY: []}]
        if open_paths is not None:
            components["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(document: dict[str, Any], schemas: dict[str, Any], limits: Limits) -> None:
    _, found = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(BODIES.values())],
        ref_template="#/components/schemas/{model}",
    )
    structs = {**CACHE_BODIES, **DEBUG_BODIES}
    _, of_structs = msgspec.json.schema_components(structs.values(), ref_template="#/components/schemas/{name}")
    schemas.update(found["$defs"])
    schemas.update(of_structs)
    say_bounds(schemas, limits)
    for path, name in {path: model.__name__ for path, model in {**BODIES, **structs}.items()}.items():
        document["paths"][path]["post"]["requestBody"] = {
            "required": name != "FlushRequest",
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
        }


def _responses(
    path: str, method: str, answer: Mapping[str, Any], error: Mapping[str, Any], guarded: bool
) -> dict[str, Any]:
    """What an endpoint answers, by status."""
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if path in TEXT:
        content = {TEXT[path]: {"schema": {"type": "string"}}}
    elif path == "/v1/cache/events":
        content = {EVENTS: {"schema": EVENT}}
    elif path in STREAMS:
        content[EVENTS] = {"schema": EVENT}
    statuses = {*STATUSES.get(path, GENERATION if method == "post" else ())}
    if method == "post":
        statuses |= BODY
    failed = {"application/json": {"schema": error}}
    found = {"200": {"description": "as asked for", "content": content}}
    for status in sorted(statuses | ({401} if guarded else set())):
        found[str(status)] = {"description": WORDS[status], "content": failed}
    if path in HEALTH:
        found["503"] = {"description": "not ready: the state, and the cause", "content": content}
    return found
