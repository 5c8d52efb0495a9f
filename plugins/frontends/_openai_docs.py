"""The bodies in ``/openapi.json``. The endpoints parse them themselves (bounded, strict), so FastAPI does not know."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from engine.plugins.frontends._cache_routes import BODIES as CACHE_BODIES
from engine.plugins.frontends._debug_routes import BODIES as DEBUG_BODIES
from engine.plugins.frontends._openai_fields import Body
from engine.plugins.frontends._openai_responses import ResponsesRequest
from engine.plugins.frontends._openai_schema import ChatRequest, CompletionRequest
from engine.plugins.frontends._openai_tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/completions/render": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def describe_bodies(app: FastAPI) -> None:
    """Add the request schemas to the application's OpenAPI document."""

    def openapi() -> dict[str, Any]:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in dict.fromkeys(BODIES.values())],
            ref_template="#/components/schemas/{model}",
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        structs = {**CACHE_BODIES, **DEBUG_BODIES}
        _, of_structs = msgspec.json.schema_components(structs.values(), ref_template="#/components/schemas/{name}")
        document["components"]["schemas"].update(of_structs)
        for path, name in {path: model.__name__ for path, model in {**BODIES, **structs}.items()}.items():
            document["paths"][path]["post"]["requestBody"] = {
                "required": name != "FlushRequest",
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}},
            }
        return document

    app.openapi = openapi  # type: ignore[method-assign]
