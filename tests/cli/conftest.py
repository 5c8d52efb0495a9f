"""The ``engine`` command without a process of its own, which is most of what a short command takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from engine import AsyncEngine, EngineConfig
from engine.cli.app import run
from engine.plugins.frontends._server import bind, url_of
from engine.plugins.frontends.openai import OpenAIFrontend


@pytest.fixture(scope="session")
def served():
    """``with served(frontend, executor="sim") as url``: an engine and its server, in threads of this process."""
    return _served


@contextmanager
def _served(frontend: OpenAIFrontend, **config) -> Iterator[str]:
    engine = AsyncEngine.launch(EngineConfig.model_validate(config), in_process=True)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(frontend.app(engine), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    yield url_of(sock)
    server.should_exit = True
    thread.join()
    engine.shutdown()


@pytest.fixture
def here(capsys, monkeypatch):
    """``here("serve", "--help", env={…})`` -> exit code, standard output, standard error; in this process."""

    def call(*arguments, env=None):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in {"NO_COLOR": "1", "COLUMNS": "200", **(env or {})}.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                run(arguments)
        return (ended.value.code or 0, *capsys.readouterr())

    return call
