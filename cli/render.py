"""``engine render``: the exact prompt that a conversation becomes. Reads the tokenizer, not the weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from engine.cli.flags import with_config
from engine.core.config import EngineConfig, LoadedConfig
from engine.core.errors import InvalidRequest


@with_config(without=[name for name in EngineConfig.model_fields if name != "model"])
def render(
    conversation: Annotated[
        str,
        typer.Argument(
            help="What a user says; or JSON: messages, or the body of a chat request; - reads it from standard input."
        ),
    ],
    *,
    loaded: LoadedConfig,
    open_turn: Annotated[
        bool, typer.Option("--open-turn/--closed", help="End with the words that open the assistant's turn.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print text and token ids for programs.")] = False,
) -> None:
    """Show the exact prompt, text and token ids, that a conversation becomes."""
    from engine.core.models.source import resolve
    from engine.core.models.tokenizer import load_tokenizer

    messages = messages_of(sys.stdin.read() if conversation == "-" else conversation)
    source = resolve(loaded.config.model)
    tokenizer = load_tokenizer(source)
    text = tokenizer.render_chat(messages, add_generation_prompt=open_turn)
    ids = tokenizer.encode(text)
    if as_json:
        typer.echo(
            json.dumps({"model": source.served_name, "prompt": text, "prompt_token_ids": ids, "count": len(ids)})
        )
        return
    typer.echo(text)
    typer.echo(" ".join(map(str, ids)))
    typer.echo(f"[{len(ids)} tokens of {source.served_name}]", err=True)


def messages_of(text: str) -> list[Mapping[str, Any]]:
    """The messages in JSON text, or one of a user who says the text. Raises ``InvalidRequest``."""
    if not text.lstrip().startswith(("[", "{")):
        return [{"role": "user", "content": text}]
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidRequest("messages", f"is not valid JSON: {error}") from error
    found = data.get("messages") if isinstance(data, dict) else data
    if not isinstance(found, list):
        raise InvalidRequest("messages", "must be a list of messages, or an object with one")
    return found
