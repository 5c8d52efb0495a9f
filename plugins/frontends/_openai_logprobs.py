"""Log-probabilities as clients expect them: the formats of completions and of chat, and vLLM's of prompts.

JSON has no infinity: what is less likely than the floor is reported as the floor (as OpenAI and vLLM do). Each token's
part is written at once, because an answer may have a million of them, and as objects they would fill memory.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.sampling import TokenLogprobs
from engine.plugins.frontends._wire import written

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer

FLOOR = -9999.0
NO_BYTES = b""


def floored(logprob: float) -> float:
    """A number that JSON has."""
    return max(logprob, FLOOR)


class Names:
    """What tokens are called: their text, or ``bytes:\\xf0\\x9f`` where their bytes are a part of a character."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the token adds to the text; none without a tokenizer."""
        return NO_BYTES if self._tokenizer is None else self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        """The token as text."""
        name = self._known.get(token)
        if name is None:
            name = self._known[token] = _name(self.bytes_of(token))
        return name


def _name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Where tokens begin in the text of a choice, in characters.

    Args:
        hidden: special tokens of the output, which are not shown.
    """

    def __init__(self, names: Names, hidden: frozenset[int]) -> None:
        self._names, self._hidden = names, hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: int, *, shown: bool | None = None) -> int:
        """The offset of the next token. Mutates. ``shown`` overrides what is hidden."""
        at = self._at
        if token not in self._hidden if shown is None else shown:
            self._at += len(self._decoder.decode(self._names.bytes_of(token)))
        return at

    def skip_to(self, at: int) -> None:
        """The next token begins there. Mutates."""
        self._decoder.reset()
        self._at = at


@dataclass(frozen=True)
class Echo:
    """The prompt that an answer begins with."""

    text: str
    tokens: tuple[int, ...]


def completion_logprobs(
    names: Names,
    offsets: Offsets,
    found: Sequence[TokenLogprobs],
    echo: Echo | None = None,
    echoed: Sequence[TokenLogprobs] = (),
) -> dict[str, Any]:
    """The object ``logprobs`` of a completion's choice, or of a piece of it: four lists of the same length. Mutates
    ``offsets``.

    Args:
        echo: the prompt comes first, with ``echoed`` of all its tokens but the first, which has no probability.
    """
    lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def add(at: int, token: int, one: TokenLogprobs | None) -> None:
        own = None if one is None else floored(one.logprob)
        for name, value in zip(lists, (at, own, names.name(token), _top(names, one)), strict=True):
            lists[name].append(value)

    if echo is not None:
        first = echo.tokens[0]  # a mark that the tokenizer has put there is not in the text
        add(offsets.next(first, shown=echo.text.startswith(names.name(first))), first, None)
        for one in echoed:
            add(offsets.next(one.token, shown=True), one.token, one)
        offsets.skip_to(len(echo.text))
    for one in found:
        add(offsets.next(one.token), one.token, one)
    return lists


def _top(names: Names, one: TokenLogprobs | None) -> msgspec.Raw | None:
    if one is None:
        return None
    top = {names.name(token): floored(value) for token, value in zip(one.top, one.top_logprobs, strict=True)}
    top.setdefault(names.name(one.token), floored(one.logprob))  # the one that was chosen is always there
    return written(top)


def chat_logprobs(names: Names, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object ``logprobs`` of a chat's choice, or of a piece of it."""
    return {
        "content": [
            written(
                {
                    **_entry(names, one.token, one.logprob),
                    "top_logprobs": [
                        _entry(names, token, value) for token, value in zip(one.top, one.top_logprobs, strict=True)
                    ],
                }
            )
            for one in found
        ],
        "refusal": None,
    }


def _entry(names: Names, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": floored(logprob), "bytes": list(names.bytes_of(token))}


def prompt_logprobs(names: Names, found: Sequence[TokenLogprobs]) -> list[msgspec.Raw | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt, token id -> its and its rivals'; ``None`` first."""
    answer: list[msgspec.Raw | None] = [None]
    for one in found:
        entries = {
            str(token): _ranked(names, token, value, rank)
            for rank, (token, value) in enumerate(zip(one.top, one.top_logprobs, strict=True), 1)
        }
        entries[str(one.token)] = _ranked(names, one.token, one.logprob, one.rank)
        answer.append(written(entries))
    return answer


def _ranked(names: Names, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": floored(logprob), "rank": rank, "decoded_token": names.name(token)}
