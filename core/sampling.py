"""How tokens are chosen and when a request ends; and what the model thought of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from engine.core.grammar import Grammar

SAMPLING = (
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs",
    "grammar",
)  # fmt: skip
"""What an executor must say that it acts on (``Executor.sampling``). The rest of ``SamplingParams`` every one does."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token and its likeliest rivals, in the model's own distribution: before temperature, penalties, biases and
    filters. (Source: vLLM's default, ``raw_logprobs``.)

    Attributes:
        token: the token that was sampled, or that stands in the prompt.
        logprob: natural logarithm of its probability; may be minus infinity.
        rank: 1 for the likeliest token.
        top: the likeliest tokens, likeliest first, as many as were asked for.
        top_logprobs: theirs.
    """  # gc=False: an answer may have a million, and each collection of garbage would look at them all

    token: int
    logprob: float
    rank: int
    top: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Logits go through ``grammar``, ``logit_bias``, the stop tokens that ``min_tokens`` forbids, the penalties
    (repetition, then frequency and presence), temperature, top_k, top_p and min_p, in this order.

    Args:
        max_tokens: most tokens to generate; ``None`` is all the room the model's length leaves.
        temperature: 0 (or below 1e-5) is greedy; 1 samples from the model's own distribution.
        top_p: sample from the smallest set of tokens whose probabilities sum to at least this, in (0, 1].
        top_k: sample from the k likeliest tokens; 0 is off; above the vocabulary is off too.
        min_p: sample from tokens at least so likely, as a part of the likeliest one's probability, in [0, 1]; 0 is off.
        repetition_penalty: divides logits of tokens in prompt or output (multiplies negative ones), in (0, 10].
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: subtracted as often as the token is in the output, in [-2, 2].
        logit_bias: token id -> what is added to its logit, in [-100, 100].
        seed: makes the request reproducible in any batch; ``None`` draws one.
        n: choices of one prompt, each a sequence of its own.
        choice: which of a prompt's choices this is. Random numbers depend on seed, choice and position alone.
        stop: strings that end the text. Matched on text by the frontend side.
        include_stop_str_in_output: what ended the text (stop string or token) is part of it.
        stop_token_ids: token ids that end the request, like end-of-sequence.
        ignore_eos: go on after the model's end-of-sequence token.
        min_tokens: no stop by token or string before this many tokens.
        skip_special_tokens: marks such as end-of-sequence are left out of the text.
        logprobs: report each token's log-probability and so many of its likeliest rivals; ``None``: nothing.
        prompt_logprobs: the same for the prompt's tokens. The prefix cache is then not read.
        grammar: what the output must be. It ends where the grammar is complete, or cut short by ``max_tokens``.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    n: int = 1
    choice: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken and no random number is drawn."""
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        """True where the tokens so far change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def reports(self) -> bool:
        """True where log-probabilities are asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def used(self) -> list[str]:
        """Which of ``SAMPLING`` it uses."""
        return [name for name in SAMPLING if getattr(self, name) != DEFAULTS[name]]

    def choices(self) -> list[SamplingParams]:
        """Parameters of each of the ``n`` choices."""
        return [self] if self.n == 1 else [replace(self, n=1, choice=choice) for choice in range(self.n)]


DEFAULTS = {name: getattr(SamplingParams(), name) for name in SAMPLING}
