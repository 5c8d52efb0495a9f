"""Who may see the dashboard: a login form and a session for browsers, which cannot send an API key of their own."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.keys import Keys
from engine.plugins.frontends._dashboard_login import LOGIN_POLICY, login_page
from engine.plugins.frontends._errors import HTTPError
from engine.plugins.frontends._wire import json_response

SESSION_SECONDS = 12 * 3600.0
MOST_SESSIONS = 256
FORM_BYTES = 4096
POLICY_VIOLATED = 1008
PAGE_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)
"""Nothing comes from elsewhere, and nobody frames it. Vue makes functions of templates, hence ``unsafe-eval``."""

FOREIGN = HTTPError(403, "this page may not ask: it comes from elsewhere", code="foreign_origin")
MISSING = HTTPError(
    401, "an API key is required: log in, or Authorization: Bearer KEY", "authentication_error",
    code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
)  # fmt: skip


class Session(NamedTuple):
    """Somebody who has logged in: by which key (its digest), and until when."""

    key: bytes
    until: float


class Sessions:
    """Who has logged in. A session ends after hours, by logging out, with its key, or where too many come after it.

    Args:
        keys: those that open one.
    """

    def __init__(self, keys: Keys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys, clock
        self._known: OrderedDict[bytes, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, key: str) -> str | None:
        """The token of a new session: random, it says nothing of the key. ``None``: the key is wrong. Mutates."""
        digest = self._keys.digest_of(key)
        if digest is None:
            return None
        token = secrets.token_urlsafe(32)
        self._known[_digest(token)] = Session(digest, self._clock() + SESSION_SECONDS)
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)
        return token

    def valid(self, token: str) -> bool:
        """Whether this is the token of a session. Forgets one that is over."""
        place = _digest(token)
        session = self._known.get(place)
        if session is None:
            return False
        if session.until < self._clock() or not self._keys.in_force(session.key):
            del self._known[place]
            return False
        return True

    def end(self, token: str) -> None:
        """Log out. Unknown tokens are fine. Mutates."""
        self._known.pop(_digest(token), None)


class Guard:
    """ASGI application around the dashboard's: every path of it, its assets and its socket want a key or a session.

    Args:
        inner: the dashboard.
        path: where it is mounted, as metrics name it.
        keys: ``None``: nobody needs one.
    """

    def __init__(self, inner: ASGIApp, path: str, keys: Keys | None) -> None:
        self._inner, self._path, self._keys = inner, path, keys
        self.sessions = None if keys is None else Sessions(keys)
        self._cookie = f"dashboard_{secrets.token_hex(4)}"  # servers on other ports of a host have their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on what may pass."""
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(scope, receive)
            scope["route"] = _Counted(self._path)
            if answer is None:
                await self._inner({**scope}, receive, secured(send))
            else:
                await answer({**scope}, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = self._token(scope)
        if foreign(scope) or not self._may(scope, token):
            await send({"type": "websocket.close", "code": POLICY_VIOLATED})
            return
        bearer, closed = not self._by_session(token), False

        async def put(message: Message) -> None:
            nonlocal closed
            if closed:
                return
            if not bearer and not self._by_session(token):  # logged out, or the key is no longer in force
                closed = True
                message = {"type": "websocket.close", "code": POLICY_VIOLATED}
            await send(message)

        await self._inner({**scope}, receive, put)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        """What the guard itself answers; ``None``: the dashboard does."""
        root, path, method = scope.get("root_path", ""), scope["path"], scope["method"]
        inside = path.removeprefix(root) if root.endswith(self._path) else ""
        base = root if inside else path
        reads = method in ("GET", "HEAD")
        if foreign(scope) and not (reads and inside in ("", "/")):  # links from elsewhere may lead to the page
            return refused(FOREIGN)
        if inside == "/login" and self.sessions is not None:
            return RedirectResponse(base + "/", 303) if reads else await self._login(scope, receive, base)
        if inside == "/logout" and method == "POST":
            return self._logout(scope, base)
        token = self._token(scope)
        if not self._may(scope, token):
            page = reads and inside in ("", "/")
            return form(base, 401, "") if page else refused(MISSING)
        return RedirectResponse(base + "/", 307) if not inside else None

    async def _login(self, scope: Scope, receive: Receive, base: str) -> Response:
        assert self.sessions is not None
        body = b""
        try:
            async for piece in Request(scope, receive).stream():
                body += piece
                if len(body) > FORM_BYTES:
                    return form(base, 413, "That is too long for a key.")
        except ClientDisconnect:
            return Response(status_code=499)
        fields = parse_qs(body.decode("utf-8", "replace"), max_num_fields=4)
        token = self.sessions.begin(fields.get("key", [""])[0].strip())
        if token is None:
            return form(base, 401, "That key is wrong.")
        answer = RedirectResponse(base + "/", 303)
        answer.set_cookie(
            self._cookie, token, max_age=int(SESSION_SECONDS), path=base, secure=scope["scheme"] == "https",
            httponly=True, samesite="strict",
        )  # fmt: skip
        return answer

    def _logout(self, scope: Scope, base: str) -> Response:
        if self.sessions is not None and (token := self._token(scope)):
            self.sessions.end(token)
        answer = RedirectResponse(base + "/", 303)
        answer.delete_cookie(self._cookie, path=base, httponly=True, samesite="strict")
        return answer

    def _may(self, scope: Scope, token: str) -> bool:
        if self._keys is None or self._by_session(token):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._keys.holder(given.strip()) is not None

    def _by_session(self, token: str) -> bool:
        return bool(token) and self.sessions is not None and self.sessions.valid(token)

    def _token(self, scope: Scope) -> str:
        try:
            found = SimpleCookie(Headers(scope=scope).get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value


class _Counted(NamedTuple):
    """What metrics and logs call the path that has answered."""

    path: str


def foreign(scope: MutableMapping[str, Any]) -> bool:
    """Whether a page of another origin asks. What is no browser says nothing of an origin."""
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    return not hmac.compare_digest(urlsplit(origin).netloc.lower().encode(), headers.get("host", "").lower().encode())


def form(base: str, status: int, words: str) -> Response:
    """The login form."""
    headers = {**LOGIN_POLICY, "cache-control": "no-store", "x-frame-options": "DENY"}
    return HTMLResponse(login_page(base + "/login", words), status, headers)


def refused(failure: HTTPError) -> Response:
    """An error as JSON, as every other route answers."""
    return json_response(failure.body(), failure.status, failure.headers)


def secured(send: Send) -> Send:
    """Answers of the dashboard, with what browsers are to keep to, and without a word to pages from elsewhere."""

    async def put(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in [name for name in headers if name.startswith("access-control-")]:
                del headers[name]
            headers.update({"content-security-policy": PAGE_POLICY, "x-frame-options": "DENY",
                            "x-content-type-options": "nosniff", "referrer-policy": "same-origin"})  # fmt: skip
        await send(message)

    return put


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
