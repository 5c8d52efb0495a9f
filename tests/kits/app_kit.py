"""Requests to an application in this process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx


def post(app: Any, path: str, body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())

    return asyncio.run(ask())


def refused(app: Any, path: str, body: Any, param: str, code: str = "above_limit") -> str:
    answer = post(app, path, body)
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    assert len(answer.content) < 1000
    return str(error["message"])
