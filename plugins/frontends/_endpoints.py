"""What stands around the endpoints of every HTTP interface here: the key, request ids, and errors in one language."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match

from engine.core.errors import ConfigError, suggest
from engine.core.keys import Keys
from engine.plugins.frontends._aside import Aside
from engine.plugins.frontends._bounds import MOST_PARTS, Most, check_parts
from engine.plugins.frontends._errors import HTTPError, as_http
from engine.plugins.frontends._wire import CLIENT_CLOSED, ClientGone, Held, authorize, json_response, read_body

log = logging.getLogger(__name__)

LARGE_BODY = 16 * 1024  # bytes; larger ones are parsed, tokenised and checked in a thread
MANY_PARTS = 64  # lists, or twice as many texts: each may be a prompt to tokenise and to check
BODIES_HELD = 16  # so many of the largest may be in memory at once, read in part or as a whole
PATIENCE = 60.0
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Route = tuple[str, str, Handler, bool]
"""Path, method, handler, and whether the API key guards it."""

Read = Callable[[Request, Callable[[bytes], Any]], Awaitable[Any]]
"""What a function makes of a request's body: ``Endpoints.read``."""


class Endpoints:
    """Base of an interface: ``build`` makes its application. Whatever a handler raises becomes an answer.

    Args:
        keys: what guarded routes ask for; ``None``: nobody needs one.
        max_body_bytes, max_parts, max_elements: largest body that ``read`` takes: see ``Most``.
        open_paths: paths of routes that need no key after all.
        patience: seconds in which something of a body must come.
    """

    def __init__(
        self,
        *,
        keys: Keys | None,
        max_body_bytes: int,
        max_parts: int = MOST_PARTS,
        max_elements: int | None = None,
        open_paths: Collection[str] = (),
        patience: float = PATIENCE,
    ) -> None:
        self._keys, self._max_body, self._open_paths = keys, max_body_bytes, frozenset(open_paths)
        self._most = Most.body(max_parts, max_elements)
        self._patience, self._held = patience, Held(BODIES_HELD * max_body_bytes)
        self.aside = Aside()

    def build(self, title: str, routes: Iterable[Route], *, origins: Sequence[str] = ()) -> FastAPI:
        """The ASGI application, with ``/openapi.json``. Pages of other ``origins`` may ask, too (CORS).

        Raises:
            ConfigError: one of ``open_paths`` is no path.
        """
        app = FastAPI(title=title, version=version("sixhooks"), docs_url=None, redoc_url=None, openapi_url=None)

        async def openapi(request: Request) -> Response:
            """This document."""
            return json_response(with_path_parameters(app.openapi()))

        table: list[Route] = [*routes, ("/openapi.json", "GET", openapi, True)]
        paths = {path for path, *_ in table}
        for wrong in self._open_paths - paths:
            raise ConfigError(f"open_paths: there is no path {wrong!r}: {suggest(wrong, paths)}")
        for path, method, handler, guarded in table:
            endpoint = self._safely(handler, guarded and path not in self._open_paths)
            app.add_api_route(path, endpoint, methods=[method], response_model=None, name=handler.__name__)
        app.add_exception_handler(HTTPException, self._no_route)
        if origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"],
                allow_headers=["*"],  # clients' libraries send their own; keys are bearer tokens, never cookies
                expose_headers=["X-Request-Id", "Retry-After"],
            )  # fmt: skip
        return app

    async def version(self, request: Request) -> Response:
        """The engine's version."""
        return json_response({"version": version("sixhooks")})

    async def read(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What ``work`` makes of the body: in a thread where that may take a while. Raises ``InvalidRequest``, too,
        where there is too much in it."""
        with self._held.lease() as lease:
            body = await read_body(request, self._max_body, self._patience, lease)
            return await self.aside.run(lambda: self._large(body, work)) if is_large(body) else work(body)

    def failure(self, error: Exception) -> HTTPError:
        """An error as clients are told of it. Those that are our own fault are logged."""
        failure = as_http(error)
        if failure.code == "internal_error":
            log.error("an endpoint failed", exc_info=error)
        return failure

    def refused(self, request: Request, failure: HTTPError) -> None:
        """A request is about to be answered with an error. Nothing by default."""

    def left(self) -> None:
        """A client has left before its answer began. Nothing by default."""

    def check_accepts(self) -> None:
        """Raise where no more work is taken. Asked before each POST is handled. By default it is always."""

    # ---- inside

    def _large(self, body: bytes, work: Callable[[bytes], T]) -> T:
        check_parts(body, self._most)
        return work(body)

    def _safely(self, handler: Handler, guarded: bool) -> Handler:
        async def endpoint(request: Request) -> Response:
            try:
                request.state.tenant = self._tenant(request, guarded)
                if request.method == "POST":
                    self.check_accepts()
                return await handler(request)
            except ClientGone:
                self.left()
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                return self._refusal(request, error)

        endpoint.__doc__ = handler.__doc__
        return endpoint

    def _tenant(self, request: Request, guarded: bool) -> str | None:
        """What ``tenant_of`` says of a request. Raises ``HTTPError`` 401."""
        label = authorize(request, self._keys) if guarded else ""
        return label or ("" if self._keys is not None and self._keys.labels else None)

    def _refusal(self, request: Request, error: Exception) -> Response:
        failure = self.failure(error)
        self.refused(request, failure)
        return json_response(failure.body(), failure.status, {**failure.headers, "x-request-id": id_of(request)})

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code, headers = "not_found", dict(error.headers or {})
        if error.status_code == 405:
            code, headers = "method_not_allowed", allowed(request)
        words = f"{error.detail}: {request.method} {request.url.path}"
        return self._refusal(request, HTTPError(error.status_code, words, code=code, headers=headers))


def is_large(body: bytes) -> bool:
    """Whether to read it may take some milliseconds."""
    return len(body) > LARGE_BODY or body.count(b"[") > MANY_PARTS or body.count(b'"') > 4 * MANY_PARTS


def allowed(request: Request) -> dict[str, str]:
    """The methods that a path has, whichever of its routes they belong to, as a header."""
    scope = request.scope
    found = {
        method
        for route in request.app.routes
        if route.matches(scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    return {"Allow": ", ".join(sorted(found))}


def with_path_parameters(document: dict[str, Any]) -> dict[str, Any]:
    """Declare the parameters that stand in paths: handlers take them from the request, so nobody else does. Mutates."""
    for path, operations in document["paths"].items():
        names = re.findall(r"{(\w+)}", path)
        named = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        for operation in operations.values() if named else ():
            others = [one for one in operation.get("parameters", []) if one["name"] not in names]
            operation["parameters"] = [*others, *named]
    return document


def tenant_of(request: Request) -> str | None:
    """The label of the API key that the request came with: empty where it has none but others have, ``None`` where no
    key has one."""
    tenant: str | None = getattr(request.state, "tenant", None)
    return tenant


def id_of(request: Request) -> str:
    """The client's ``X-Request-Id`` if it can be echoed in a header, else one of ours; the same whenever asked."""
    if not hasattr(request.state, "id"):
        wanted = request.headers.get("x-request-id", "")
        request.state.id = wanted if REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex
    own: str = request.state.id
    return own
