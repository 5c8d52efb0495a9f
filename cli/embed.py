"""``engine embed``: texts as vectors, a line of JSON each."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from engine.cli.flags import with_config
from engine.cli.generate import SERVER_ONLY
from engine.core.config import LoadedConfig


@with_config(without=(*SERVER_ONLY, "seed"), checked=True)
def embed(
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads them from standard input, one a line.")],
    *,
    loaded: LoadedConfig,
    pooling: Annotated[
        Literal["last", "mean"], typer.Option(help="The last token's hidden state, or the mean of all tokens'.")
    ] = "last",
    normalize: Annotated[bool, typer.Option("--normalize/--raw", help="Vectors of length 1, or as they are.")] = True,
) -> None:
    """Turn texts into vectors: for each a line of JSON with index, embedding and prompt_tokens."""
    from engine.core.pooling import Pooling
    from engine.llm import LLM

    asked = [line.rstrip("\n") for line in sys.stdin] if texts == ["-"] else texts
    with LLM(config=loaded.config) as llm:
        for index, found in enumerate(llm.embed(asked, Pooling(kind=pooling, normalize=normalize))):
            line = {"index": index, "embedding": found.vector.tolist(), "prompt_tokens": found.prompt_tokens}
            typer.echo(json.dumps(line))
