"""What callers of the engine get back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.core.pooling import Vector
from engine.core.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. The last one has ``finish_reason`` and the final counts.

    ``text`` never contains a part of a stop string (unless it was asked for), nor half a character. ``logprobs`` are
    those of ``token_ids``, ``prompt_logprobs`` (with the first tokens) those of the prompt from its second token on;
    both only where ``SamplingParams`` asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    detail: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation. Log-probabilities as in ``Chunk``; ``None`` where nobody asked for them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    detail: str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """A prompt as a vector. ``data`` are its float32 numbers, little-endian.

    ``cached_tokens`` of the prompt were not computed, since the prefix cache had them.
    """

    data: bytes
    prompt_tokens: int
    cached_tokens: int

    @property
    def vector(self) -> Vector:
        """The numbers as a read-only array, ``[hidden_size]``."""
        return np.frombuffer(self.data, "<f4")
