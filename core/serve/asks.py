"""What is asked of an engine, and whether there is room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequest, QueueFull
from engine.core.pooling import Pooling
from engine.core.protocols import Limits
from engine.core.request import SamplingParams
from engine.core.serve.ledger import Ledger
from engine.core.validate import check_fields, validate

LOGPROBS_AT_ONCE = 8  # so many times what one request may come to is kept for all that are open


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt to submit, with ``params.n`` choices. ``request_id`` is the caller's name for it: not unique, only
    echoed and abortable. ``deadline`` is in seconds; ``tenant`` is who asks, as the server knows him: policies see it
    in ``metadata`` instead of what the caller says there, which they see where it is ``None`` only (empty: nobody's);
    ``note`` stays with its streams, for whoever is told how they ended. The other fields are those of
    ``EngineCore.add``. With ``pooling`` it comes to a vector, the ``vector`` of its stream, and to no token."""

    tokens: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: int = 0
    salt: str = ""
    metadata: Mapping[str, Any] | None = None
    read_cache: bool = True
    write_cache: bool = True
    cache_ttl: float | None = None
    deadline: float | None = None
    tenant: str | None = None
    note: str = ""
    pooling: Pooling | None = None

    def check(self, limits: Limits) -> None:
        """Raise ``InvalidRequest`` where any field has a wrong type or breaks a limit. Long prompts take a while."""
        validate(self.tokens, self.params, limits, self.pooling)
        check_fields(
            request_id=self.request_id, priority=self.priority, salt=self.salt, metadata=self.metadata,
            read_cache=self.read_cache, write_cache=self.write_cache, cache_ttl=self.cache_ttl, deadline=self.deadline,
        )  # fmt: skip


class Size(NamedTuple):
    """What asks that are submitted as one come to: sequences, prompt tokens of them all, and the most
    log-probabilities that are kept for them."""

    sequences: int
    tokens: int
    logprobs: int


def size_of(asks: Sequence[Ask], limits: Limits) -> Size:
    """How much it is. Raises ``InvalidRequest`` for what could never be open at once, or would be kept for a caller."""
    count, tokens = sum(ask.params.n for ask in asks), sum(ask.params.n * len(ask.tokens) for ask in asks)
    if count > limits.max_open:
        words = f"{count} sequences in one request, at most {limits.max_open} can be open"
        raise InvalidRequest("n", words, code="above_limit")
    if count > 1 and tokens > limits.max_waiting_tokens:
        words = f"{tokens} tokens in {count} sequences, at most {limits.max_waiting_tokens} may wait"
        raise InvalidRequest("prompt", words, code="above_limit")
    return Size(count, tokens, _logprobs_of(asks, limits))


def _logprobs_of(asks: Sequence[Ask], limits: Limits) -> int:
    of_prompts = sum(ask.params.n * prompt_logprobs_of(ask.params, len(ask.tokens)) for ask in asks)
    entries = sum(ask.params.n * logprobs_of(ask.params, len(ask.tokens), limits) for ask in asks)
    if of_prompts > (most := max(limits.max_output_logprobs, limits.max_prompt_logprobs)):
        words = f"all prompts' log-probabilities come to {of_prompts}, at most {most} are allowed"
        raise InvalidRequest("prompt_logprobs", words, code="above_limit")
    if entries > limits.max_output_logprobs:
        words = (
            f"sequences x tokens x (rivals + 1) come to {entries} log-probabilities, at most "
            f"{limits.max_output_logprobs} are allowed: set max_tokens, or ask for fewer"
        )
        raise InvalidRequest("logprobs", words, code="above_limit")
    return entries + of_prompts


def check_room(size: Size, limits: Limits, ledger: Ledger) -> None:
    """Raise ``QueueFull`` where there is no room now, with an estimate of when there will be."""
    count, tokens, entries = size
    if (missing := len(ledger) + count - limits.max_open) > 0:
        words = f"{len(ledger)} requests are open, at most {limits.max_open} may be: try again later"
        raise QueueFull(words, retry_after=ledger.ends.wait_for(missing))
    if ledger.logprobs and ledger.logprobs + entries > (most := LOGPROBS_AT_ONCE * limits.max_output_logprobs):
        words = f"open requests may come to {ledger.logprobs} log-probabilities, at most {most} are kept at once"
        raise QueueFull(f"{words}: there is no room for {entries} more", retry_after=ledger.ends.wait_for(1))
    waiting = ledger.waiting_tokens
    if waiting and (missing := waiting + tokens - limits.max_waiting_tokens) > 0:
        words = (
            f"requests with {waiting} prompt tokens wait, at most {limits.max_waiting_tokens} tokens may: there is "
            f"no room for {tokens} more, try again later"
        )
        raise QueueFull(words, retry_after=ledger.ends.wait_for(missing * len(ledger) / waiting))


def logprobs_of(params: SamplingParams, prompt: int, limits: Limits) -> int:
    """The most log-probabilities that one choice's output may come to, rivals included."""
    if params.logprobs is None:
        return 0
    return (params.logprobs + 1) * (params.max_tokens or limits.max_model_len - prompt)


def prompt_logprobs_of(params: SamplingParams, prompt: int) -> int:
    """The same of its prompt."""
    return 0 if params.prompt_logprobs is None else (params.prompt_logprobs + 1) * prompt
