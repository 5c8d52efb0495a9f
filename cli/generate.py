"""``engine generate``: one prompt, answered in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from engine.cli.flags import with_config
from engine.core.config import LoadedConfig
from engine.core.errors import EngineError

SERVER_ONLY = (
    "frontend", "role", "host", "port", "api_key", "api_key_file", "cors_origin", "heartbeat_timeout", "step_timeout",
    "progress_timeout", "drain_timeout", "log_requests", "log_prompts", "otel",
)  # fmt: skip


@with_config(without=(*SERVER_ONLY, "seed"), checked=True)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    *,
    loaded: LoadedConfig,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens up to this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text (repeatable).")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Ask as a user of a chat, or continue the text.")] = True,
) -> None:
    """Answer one prompt, streamed to the terminal (the statistics go to standard error)."""
    from engine.core.request import SamplingParams
    from engine.llm import LLM

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=tuple(stop or ())
    )
    with LLM(config=loaded.config) as llm:
        asked = llm.render_chat([{"role": "user", "content": text}]) if chat else text
        for chunk in llm.stream(asked, params):
            typer.echo(chunk.text, nl=False)
            last = chunk
    typer.echo()
    typer.echo(
        f"[{last.prompt_tokens} prompt tokens ({last.cached_tokens} cached), {last.output_tokens} generated, "
        f"finish: {last.finish_reason}]",
        err=True,
    )
    if last.finish_reason == "error":
        raise EngineError(f"the engine could not go on: {last.detail}")
