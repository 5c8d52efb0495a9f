"""What callers of the engine get back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. The last one has ``finish_reason`` and the final counts.

    ``text`` never contains a part of a stop string, nor half a character.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    detail: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    detail: str | None
    prompt_tokens: int
    cached_tokens: int
