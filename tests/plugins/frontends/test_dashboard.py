"""The dashboard's doors: who gets in, by which key, from where; what is open no longer than it may be."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.errors import ConfigError
from engine.core.keys import Keys
from engine.plugins.frontends import _dashboard_guard as guard
from engine.plugins.frontends._dashboard_guard import MOST_SESSIONS, SESSION_SECONDS, Sessions
from engine.plugins.frontends.openai import OpenAIFrontend, OpenAIOptions

SIM = ("--executor", "sim", "--executor.step-ms", "2", "--frontend.dashboard")
KEY = "open-sesame"
SOCKET = "/dashboard/_nicegui_ws/socket.io/?EIO=4"


# ---- sessions


def test_a_session_ends_with_time_by_logging_out_with_its_key_and_where_too_many_follow(tmp_path: Any) -> None:
    now = [0.0]
    file = tmp_path / "keys"
    file.write_text("a: one\nb: two\n")
    keys = Keys((), file)
    sessions = Sessions(keys, lambda: now[0])
    assert sessions.begin("three") is None
    assert sessions.begin("") is None
    first, second = sessions.begin("one"), sessions.begin("two")
    assert first
    assert second
    assert first != second
    assert "one" not in first
    assert sessions.valid(first)
    assert not sessions.valid("one")
    assert not sessions.valid("")
    file.write_text("b: two\n")
    keys.reload()
    assert not sessions.valid(first)
    assert sessions.valid(second)
    now[0] = SESSION_SECONDS + 1
    assert not sessions.valid(second)
    tokens = [str(sessions.begin("two")) for _ in range(MOST_SESSIONS + 3)]
    assert len(sessions) == MOST_SESSIONS
    assert not sessions.valid(tokens[2])
    assert sessions.valid(tokens[3])
    sessions.end(tokens[3])
    assert not sessions.valid(tokens[3])


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"origin": "http://a.org:81"}, False),
        ({"origin": "https://A.org:81"}, False),  # behind a proxy that speaks TLS
        ({"origin": "http://a.org"}, True),
        ({"origin": "http://evil.org"}, True),
        ({"origin": "null"}, True),
        ({"origin": ""}, True),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
    ],
)
def test_pages_from_elsewhere_are_told_by_their_origin(headers: dict[str, str], expected: bool) -> None:
    raw = [(name.encode(), value.encode()) for name, value in {"host": "a.org:81", **headers}.items()]
    assert guard.foreign({"headers": raw}) == expected


def test_what_is_missing_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(ConfigError, match=r"needs NiceGUI 3: pip install 'sixhooks\[dashboard\]'"):
        OpenAIFrontend(OpenAIOptions(dashboard=True)).open(host="127.0.0.1", port=0)


def test_without_keys_it_is_open_but_not_to_pages_from_elsewhere() -> None:
    passed: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"access-control-allow-origin", b"*")]})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        app = guard.Guard(inner, "/dashboard", None)
        transport = httpx.ASGITransport(app, root_path="/llm/dashboard")
        async with httpx.AsyncClient(transport=transport, base_url="http://a.org/llm/dashboard") as http:
            found = await http.get("/")
            assert (found.status_code, found.headers.get("access-control-allow-origin")) == (200, None)
            assert (await http.get("/login")).status_code == 200  # the dashboard's own affair: there is no form
            assert (await http.post("/x", headers={"origin": "http://evil.org"})).status_code == 403
            assert (await http.get("/x", headers={"origin": "http://evil.org"})).status_code == 403
            assert (await http.get("/", headers={"sec-fetch-site": "cross-site"})).status_code == 200  # a link
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        scope = {"type": "websocket", "path": "/llm/dashboard/s", "root_path": "/llm/dashboard",
                 "headers": [(b"host", b"a.org"), (b"origin", b"http://evil.org")]}  # fmt: skip
        await app(scope, None, send)  # type: ignore[arg-type]
        assert told == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(main())
    assert passed == ["/llm/dashboard/", "/llm/dashboard/login", "/llm/dashboard/"]


class Shy:
    """Raises when it is asked what it is, as lazy stand-ins for what cannot be imported do."""

    @property  # type: ignore[override]
    def __class__(self) -> type:
        raise ImportError("not to be asked")


@pytest.mark.skipif(not find_spec("nicegui"), reason="needs pip install 'sixhooks[dashboard]'")
def test_it_starts_and_stops_whatever_else_is_in_the_process() -> None:
    from engine.plugins.frontends._dashboard_stage import stage

    async def main() -> None:
        transport = httpx.ASGITransport(stage())
        async with httpx.AsyncClient(transport=transport, base_url="http://a.org") as http:
            assert (await http.get("/favicon.ico")).status_code == 200
        assert stage().running
        await stage().stop()
        assert not stage().running

    shy = Shy()
    asyncio.run(main())
    asyncio.run(main())
    with pytest.raises(ImportError):
        isinstance(shy, int)


# ---- a server with keys


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its file of keys."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"a: {KEY}\nb: other\n")
    return file


@pytest.fixture(scope="module")
def guarded(launch: Any, file: Path) -> Iterator[Any]:
    """The server; the last of the tests ends it."""
    if not find_spec("nicegui"):
        pytest.skip("needs pip install 'sixhooks[dashboard]'")
    server = launch(*SIM, "--api-key-file", str(file))
    server.http.headers["authorization"] = f"Bearer {KEY}"
    try:
        yield server
    finally:
        assert server.stop() == 0
    assert "Traceback" not in server.output


def asset(server: Any) -> str:
    """The path of a script that the page loads."""
    page = server.http.get("/dashboard/").text
    return page[page.index("/dashboard/_nicegui/") :].split('"', 1)[0]


def logged_in(server: Any) -> httpx.Client:
    http = httpx.Client(base_url=server.url)
    answer = http.post("/dashboard/login", data={"key": KEY})
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/")
    return http


def upgraded(server: Any, **headers: str) -> int:
    """The status of an attempt to open the page's socket."""
    asked = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-version": "13",
             "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("GET", f"{SOCKET}&transport=websocket", headers={**asked, **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def test_every_path_of_it_wants_a_key(guarded: Any) -> None:
    paths = ["/dashboard", "/dashboard/", asset(guarded), f"{SOCKET}&transport=polling", "/dashboard/nowhere",
             "/dashboard/_nicegui/1/components/x", "/dashboard/favicon.ico"]  # fmt: skip
    with httpx.Client(base_url=guarded.url) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": f"dashboard={KEY}"}, {"authorization": KEY}):
            for path in paths:
                for method in ("GET", "HEAD", "POST", "PUT"):
                    answer = http.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path)
            assert upgraded(guarded, **headers) == 403
    assert "Bearer" in httpx.get(guarded.url + paths[2]).headers["www-authenticate"]
    assert httpx.get(guarded.url + paths[2]).json()["error"]["code"] == "invalid_api_key"
    for path in paths[:4]:
        assert guarded.http.get(path, follow_redirects=True).status_code == 200
    assert guarded.http.get("/dashboard").headers["location"] == "/dashboard/"
    assert upgraded(guarded, authorization=f"Bearer {KEY}") == 101


def test_a_browser_logs_in_with_a_key_and_gets_a_session_that_says_nothing_of_it(guarded: Any) -> None:
    page = httpx.get(guarded.url + "/dashboard/")
    assert 'action="/dashboard/login"' in page.text
    assert "script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for wrong in ("nope", "", "<b>"):
        answer = httpx.post(guarded.url + "/dashboard/login", data={"key": wrong})
        assert (answer.status_code, "That key is wrong" in answer.text) == (401, True)
        assert "set-cookie" not in answer.headers
        assert "<b>" not in answer.text
    assert httpx.post(guarded.url + "/dashboard/login", content=b"key=" + b"x" * 5000).status_code == 413
    answer = httpx.post(guarded.url + "/dashboard/login", data={"key": KEY})
    cookie = answer.headers["set-cookie"]
    assert KEY not in cookie
    assert {"httponly", "path=/dashboard", "samesite=strict"} <= set(cookie.lower().split("; "))
    with closing(logged_in(guarded)) as http:
        assert http.get("/dashboard/").status_code == 200
        assert http.get(asset(guarded)).status_code == 200
        session = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
        assert upgraded(guarded, cookie=session) == 101
        assert http.get("/v1/models").status_code == 401  # it opens the dashboard and nothing else
        assert http.post("/dashboard/logout").status_code == 303
        assert httpx.get(guarded.url + "/dashboard/", headers={"cookie": session}).status_code == 401
        assert upgraded(guarded, cookie=session) == 403


def test_pages_from_elsewhere_get_nothing(guarded: Any) -> None:
    with closing(logged_in(guarded)) as http:
        session = "; ".join(f"{name}={value}" for name, value in http.cookies.items())
        for origin in ("https://evil.org", "null"):
            headers = {"origin": origin}
            assert http.get(f"{SOCKET}&transport=polling", headers=headers).status_code == 403
            assert http.post("/dashboard/logout", headers=headers).status_code == 403
            assert http.post("/dashboard/login", data={"key": KEY}, headers=headers).status_code == 403
            assert upgraded(guarded, cookie=session, origin=origin) == 403
            assert upgraded(guarded, authorization=f"Bearer {KEY}", origin=origin) == 403
        own = {"origin": guarded.url}
        answer = http.get(f"{SOCKET}&transport=polling", headers=own)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert upgraded(guarded, cookie=session, **own) == 101
        page = http.get("/dashboard/").headers
        assert "frame-ancestors 'none'" in page["content-security-policy"]
        assert (page["x-frame-options"], page["x-content-type-options"]) == ("DENY", "nosniff")


def test_it_is_counted_under_one_path(guarded: Any) -> None:
    httpx.get(guarded.url + "/dashboard/nowhere")
    paths = [name for name in guarded.metrics() if 'path="/dashboard' in name]
    assert paths
    assert all('path="/dashboard"' in name for name in paths)


def test_open_pages_end_with_their_key_and_hold_up_no_end(guarded: Any, file: Path) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    with closing(logged_in(guarded)) as http:
        session = "; ".join(f"{name}={value}" for name, value in http.cookies.items())

    def drained(socket: Any) -> None:
        for _ in range(1000):
            socket.recv(timeout=60)

    @contextmanager
    def opened(**headers: str) -> Iterator[Any]:
        """The page's socket, as the page opens it."""
        found = re.search(r"client_id\W+([0-9a-f-]+)", httpx.get(guarded.url + "/dashboard/", headers=headers).text)
        assert found
        query = f"&transport=websocket&client_id={found[1]}&next_message_id=0&implicit_handshake=true"
        place = guarded.url.replace("http", "ws") + SOCKET + query + "&tab_id=t&document_id=d"
        with connect(place, additional_headers=headers) as socket:
            assert str(socket.recv(timeout=60)).startswith("0")
            socket.send("40")
            yield socket

    with opened(cookie=session) as mine, opened(authorization="Bearer other") as others:
        for socket in (mine, others):
            while "update" not in str(socket.recv(timeout=60)):
                pass
        file.write_text("b: other\n")
        guarded.process.send_signal(signal.SIGHUP)
        with pytest.raises(ConnectionClosed):
            drained(mine)
        assert httpx.get(guarded.url + "/dashboard/", headers={"cookie": session}).status_code == 401
        while "update" not in str(others.recv(timeout=60)):  # it goes on
            pass
        assert guarded.stop() == 0
    assert "dashboard  http" in guarded.output


def test_it_is_not_there_where_nobody_wants_it(server: Any) -> None:
    assert server.http.get("/dashboard").status_code == 404
    assert server.http.get("/dashboard/").status_code == 404
