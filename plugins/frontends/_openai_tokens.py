"""Text to tokens and back, and the exact prompt that a request becomes. vLLM's paths and fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.protocols import ToolParser
from engine.core.serve.client import AsyncEngine
from engine.core.serve.text import encode
from engine.core.tools import rendered as render
from engine.core.validate import check_token_ids
from engine.plugins.frontends._bounds import InSlices, Most
from engine.plugins.frontends._openai_fields import NO_BOUNDS, Body
from engine.plugins.frontends._openai_jobs import Job
from engine.plugins.frontends._openai_schema import Message


class TokenizeRequest(Body):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: str | None = Field(None, description="must be the served model; may be left out")
    prompt: str | None = None
    messages: Annotated[list[Message], InSlices] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="as the model wants them before a prompt (default true)")
    add_generation_prompt: bool | None = Field(None, description="open the assistant's turn (default true)")
    return_token_strs: bool | None = None

    @classmethod
    def parse(cls, body: bytes, most: Mapping[str, Most] = NO_BOUNDS) -> Self:
        """As ``Body.parse``; exactly one of the two must be there."""
        request = super().parse(body, most)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt", "give either prompt or messages")
        return request


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = Field(None, description="must be the served model; may be left out")
    tokens: Annotated[list[int], InSlices]


def tokenize(engine: AsyncEngine, wish: TokenizeRequest, parser: ToolParser) -> dict[str, Any]:
    """The tokens of a text, as the engine would compute them. Raises ``InvalidRequest``."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InvalidRequest("prompt", "the served model has no tokenizer")
    if wish.messages is not None:
        plain = [message.plain() for message in wish.messages]
        text = render(tokenizer, parser, plain, add_generation_prompt=wish.add_generation_prompt is not False)
    else:
        text = wish.prompt or ""
    ids = encode(tokenizer, text, engine.limits, add_special=wish.add_special_tokens is not False)
    strings = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    return {
        "count": len(ids),
        "max_model_len": engine.limits.max_model_len,
        "tokens": ids,
        "token_strs": strings if wish.return_token_strs else None,
    }


def detokenize(engine: AsyncEngine, wish: DetokenizeRequest) -> dict[str, Any]:
    """The text of tokens, marks included. Raises ``InvalidRequest``."""
    if engine.tokenizer is None:
        raise InvalidRequest("tokens", "the served model has no tokenizer")
    check_token_ids("tokens", wish.tokens, engine.limits)
    return {"prompt": engine.tokenizer.decode(wish.tokens, skip_special=False)}


def rendered(engine: AsyncEngine, job: Job) -> dict[str, Any]:
    """What the engine would be given: for each prompt its text, its tokens, and how many may follow."""
    tokenizer = engine.tokenizer
    prompts = [
        {
            "prompt": tokenizer.decode(ask.tokens, skip_special=False) if text is None and tokenizer else text,
            "prompt_token_ids": list(ask.tokens),
            "count": len(ask.tokens),
            "max_tokens": ask.params.max_tokens or engine.limits.max_model_len - len(ask.tokens),
        }
        for ask, text in zip(job.asks, job.texts, strict=True)
    ]
    return {"object": "rendered_prompts", "max_model_len": engine.limits.max_model_len, "data": prompts}
