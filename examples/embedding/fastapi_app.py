"""A web application of one's own with an engine in it: its own routes, and the OpenAI interface under ``/llm``.

uvicorn --factory fastapi_app:create_app
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount

from engine import AsyncEngine, EngineConfig, SamplingParams, http_app


def create_app(**fields: Any) -> FastAPI:
    """The application; ``fields`` are those of ``EngineConfig``."""
    config = EngineConfig(**fields)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Whatever is wrong with the engine is raised here, and stops the application's start.
        async with await AsyncEngine.start(config) as engine:
            app.state.engine = engine
            llm = Mount("/llm", http_app(engine))
            app.router.routes.append(llm)
            yield
            app.router.routes.remove(llm)

    app = FastAPI(title="A shop", lifespan=lifespan)

    @app.get("/slogan/{thing}")
    async def slogan(thing: str) -> dict[str, Any]:
        engine: AsyncEngine = app.state.engine
        wish = SamplingParams(max_tokens=16, temperature=0)
        answer = await engine.complete(f"A slogan for a shop that sells {thing}:", wish)
        return {"thing": thing, "slogan": answer.text, "tokens": len(answer.token_ids)}

    return app
