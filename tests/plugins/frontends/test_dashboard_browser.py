"""The dashboard in a browser: what a person sees of a loaded engine, and that nothing runs when he has left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.core.errors import EngineError
from engine.http import http_app

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE = 60.0
KEY = "open-sesame"
FIELDS = {
    "executor": {"name": "sim", "step_ms": 5}, "kvcache": "radix", "num_pages": 90, "max_running": 12,
    "max_batch_tokens": 128, "policies": ["fair-share"],
}  # fmt: skip
EVIL = "<img src=x onerror=alert(1)>"

pytestmark = [
    pytest.mark.skipif(not find_spec("nicegui"), reason="needs pip install 'sixhooks[dashboard]'"),
    pytest.mark.skipif(not find_spec("selenium"), reason="needs pip install selenium"),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    own = ["--no-sandbox"] if os.geteuid() == 0 else []
    for flag in ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1600,1000", *own):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@contextlib.asynccontextmanager
async def served(engine: AsyncEngine) -> AsyncIterator[tuple[str, Any]]:
    """Where the interface of an engine listens, mounted in a host as its users do, and its dashboard."""
    import uvicorn
    from fastapi import FastAPI

    app = http_app(engine, frontend={"name": "openai", "dashboard": True}, api_key=KEY)
    host = FastAPI()
    host.mount("/llm", app)
    server = uvicorn.Server(uvicorn.Config(host, port=0, log_level="warning", lifespan="off"))
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/llm/dashboard", app.state.dashboard
    finally:
        server.should_exit = True
        await task
        await app.state.dashboard.close()


async def loaded(engine: AsyncEngine) -> None:
    """Ask and ask. The first waits longest, and has a name that would do harm."""

    async def one(number: int) -> None:
        turn = 0
        while True:
            prompt = [number % 3] * 48 + [turn % 7, number] * (4 + number % 5)
            name = EVIL if number % 2 else "batch"
            params = SamplingParams(max_tokens=20 + number % 9, ignore_eos=True)
            await engine.complete(prompt, params, metadata={"tenant": name})
            turn += 1

    await asyncio.gather(*(one(number) for number in range(40)))


async def until(holds: Callable[[], Any], what: str) -> Any:
    """What ``holds`` says as soon as it says anything."""
    deadline = time.monotonic() + PATIENCE
    while not (found := await asyncio.to_thread(holds)):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)
    return found


def test_a_person_logs_in_sees_the_engine_at_work_and_leaves_nothing_behind(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium.webdriver.common.by import By

    from engine.plugins.frontends import _dashboard_stage as stage

    monkeypatch.setattr(stage, "LOOK_SECONDS", 0.2)

    def text(css: str) -> str:
        return text_of(browser, css)

    def drawn() -> bool:
        """Whether each of the charts has been painted."""
        return bool(browser.execute_script(PAINTED))

    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig.model_validate(FIELDS), in_process=True)
        async with engine, served(engine) as (url, dashboard):
            work = asyncio.create_task(loaded(engine))
            try:
                await look(engine, url, dashboard)
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def look(engine: AsyncEngine, url: str, dashboard: Any) -> None:
        assert not dashboard.feed.watching
        await asyncio.to_thread(browser.get, url)
        key = browser.find_element(By.NAME, "key")
        await asyncio.to_thread(key.send_keys, KEY + "\n")
        await until(lambda: browser.find_elements(By.CSS_SELECTOR, ".tile"), "the page does not come")
        await until(lambda: dashboard.feed.looks >= 3 and "behind" in text(".queue"), "nothing waits")
        await until(drawn, "the charts stay empty")
        assert await asyncio.to_thread(text, ".state") == "ready"
        assert "unified" in await asyncio.to_thread(text, ".chips")
        said = await asyncio.to_thread(text, ".dash")
        for words in ("Steps", "Queue", "KV pages", "Radix tree", "Pace", "Hooks", "fair-share", "hit rate"):
            assert words in said, words
        assert EVIL in said  # as it is, and not as what it would be
        before = await asyncio.to_thread(text, ".steps h2")
        await until(lambda: text(".steps h2") != before, "the page stands still")
        assert len(dashboard.feed.viewers) == 1
        assert (await engine.ask_lens("about"))["open"]
        for dark in (True, False):
            await asyncio.to_thread(browser.save_screenshot, str(tmp_path / f"{dark}.png"))
            assert (tmp_path / f"{dark}.png").stat().st_size > 50_000
            button = browser.find_element(By.CSS_SELECTOR, ".top button")
            was = browser.execute_script("return document.body.className")
            await asyncio.to_thread(button.click)
            await until(lambda was=was: browser.execute_script("return document.body.className") != was, "no theme")
        hosts = {place.split("/")[2] for place in requested(browser) if place.startswith(("http", "ws"))}
        assert hosts == {url.split("/")[2]}
        wrong = [
            line for line in browser.get_log("browser") if line["level"] == "SEVERE" and "401" not in line["message"]
        ]
        assert wrong == []
        await asyncio.to_thread(browser.find_element(By.CSS_SELECTOR, ".top form button").click)
        await until(lambda: browser.find_elements(By.NAME, "key"), "it does not log out")
        await until(lambda: not dashboard.feed.watching, "it looks on when nobody does")
        assert not (await engine.ask_lens("about"))["open"]
        await until(lambda: not stage.stage().running, "NiceGUI runs on when no page is open")
        looks = dashboard.feed.looks
        await asyncio.sleep(1.5)
        assert dashboard.feed.looks == looks

    asyncio.run(main())


PAINTED = """
const painted = canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data
  .filter((value, place) => place % 4 === 3 && value).length > 500;
const charts = [...document.querySelectorAll('.chart')];
return charts.length === 5 && charts.every(chart => [...chart.querySelectorAll('canvas')].some(painted));
"""


def text_of(browser: Any, css: str) -> str:
    """What stands there now; elements may be drawn anew at any moment, so it is found and read at once."""
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css))


def requested(browser: Any) -> list[str]:
    """All that the page has asked for."""
    found = []
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
        elif message["method"] == "Network.webSocketCreated":
            found.append(message["params"]["url"])
    return found


def test_a_page_says_that_the_engine_is_gone(browser: Any) -> None:
    from selenium.webdriver.common.by import By

    async def main() -> None:
        engine = await AsyncEngine.start(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
        try:
            async with served(engine) as (url, dashboard):
                await asyncio.to_thread(browser.get, url)
                await asyncio.to_thread(browser.find_element(By.NAME, "key").send_keys, KEY + "\n")
                await until(lambda: dashboard.feed.looks >= 2, "nobody looks")
                assert "Radix tree" not in browser.page_source
                await engine.close()
                await until(lambda: "dead" in text_of(browser, ".state"), "it says nothing")
                assert "closed" in text_of(browser, ".cause")
                with pytest.raises(EngineError):
                    await engine.ask_lens("about")
                await asyncio.to_thread(browser.get, "about:blank")
                await until(lambda: not dashboard.feed.watching, "it looks on")
        finally:
            engine.shutdown()

    asyncio.run(main())
