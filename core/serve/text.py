"""The tokenizer side of serving: found once at the start, then one text stream a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.config import EngineConfig
from engine.core.errors import InvalidRequest, ModelError
from engine.core.protocols import Limits
from engine.core.request import SamplingParams

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer

PROBE_CHARACTERS = 8  # a token: twice as many as usual text has
PROBE_GROWTH = 4
PROBE_SLACK = 64  # tokens by which the cut through the text's middle may change its beginning


def find_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of the configured model. ``None`` only for the simulated executor, which needs no model files.

    Raises:
        ModelError: the model cannot be found.
    """
    from engine.core.models.source import resolve
    from engine.core.models.tokenizer import load_tokenizer

    try:
        return load_tokenizer(resolve(config.model))
    except ModelError:
        if config.executor.name == "sim":
            return None
        raise


def encode(tokenizer: Tokenizer | None, text: str, limits: Limits, *, add_special: bool = True) -> list[int]:
    """Token ids of a prompt. A hopelessly long text is refused after a look at its beginning, not after minutes; where
    that has few tokens (it may be all blanks), after longer looks.

    Raises:
        InvalidRequest: the model has no tokenizer, or the text cannot fit.
    """
    if tokenizer is None:
        raise InvalidRequest("prompt", "the served model has no tokenizer: send token ids")
    most = limits.max_model_len
    head = most * PROBE_CHARACTERS
    while len(text) > head:
        if len(tokenizer.encode(text[:head])) > most + PROBE_SLACK:
            raise InvalidRequest(
                "prompt",
                f"has {len(text)} characters, of which the first {head} alone are more than {most} tokens; "
                f"at most {most - 1} tokens leave room for an output token",
                code="above_limit",
            )
        head *= PROBE_GROWTH
    return tokenizer.encode(text, add_special=add_special)


class Text:
    """The text of one request as its tokens come in, cut before a stop string, or behind it if that is asked for.
    Not thread-safe.

    ``min_tokens`` holds for stop strings too: the text of the tokens before that number cannot be part of a match.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        from engine.core.models.detokenizer import StopStrings, TextStream

        self._stream = TextStream(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token: int) -> str:
        """Take a token; return the new text that is certain. Mutates."""
        self._tokens += 1
        text = self._stream.push((token,))
        return text if self._tokens < self._min_tokens else self._stops.feed(text)

    def finish(self) -> str:
        """No more tokens come: return what was held back. May still meet a stop string. Mutates."""
        text = self._stops.feed(self._stream.finish())
        return text + self._stops.finish()


def text_of(tokenizer: Tokenizer | None, params: SamplingParams) -> Text | None:
    """What turns one request's tokens into text; ``None`` without a tokenizer."""
    return None if tokenizer is None else Text(tokenizer, params)
