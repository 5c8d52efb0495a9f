"""The rules that the hooks' answers must keep. Each check returns the answer to use, or raises ``Nonsense``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from engine.core.containment import Nonsense
from engine.core.errors import ExecutionError
from engine.core.plan import EvictionPool, Outcome, Plan, Reject, TransferEvent, Wait
from engine.core.request import Request
from engine.core.sampling import TokenLogprobs

REASON = 500  # characters of an objection that are kept
UNORDERED = (set, frozenset)
REQUESTS = {Request}


def order(answer: Any, step: Any, waiting: tuple[Request, ...]) -> list[Request]:
    """The same requests in another order, or a subset: by identity, each once, never more than were shown."""
    if isinstance(answer, UNORDERED):
        raise Nonsense(f"a {type(answer).__name__}, which has no order")
    try:
        ordered = list(islice(answer, len(waiting) + 1))
    except TypeError as error:
        if hasattr(answer, "__iter__"):
            raise
        raise Nonsense(f"requests that are unknown or repeated: {type(answer).__name__} is no sequence") from error
    # Requests are equal only to themselves; whatever else is in the answer may be equal to anything.
    if not set(map(type, ordered)) <= REQUESTS:
        raise Nonsense("requests that are unknown or repeated: what are no requests")
    chosen = set(ordered)
    if len(chosen) != len(ordered) or not chosen <= set(waiting):
        raise Nonsense("requests that are unknown or repeated")
    return ordered


def admit(answer: Any, step: Any, request: Request) -> Wait | Reject:
    """``Wait`` or ``Reject`` with words."""
    if isinstance(answer, Wait | Reject):
        reason = answer.reason
        if isinstance(reason, str):
            if len(reason) <= REASON:
                return answer
            return type(answer)(reason[:REASON])
    raise Nonsense(f"{_shown(answer)}, not Wait or Reject with a text")


def evict(answer: Any, need: int, pool: EvictionPool, *, most: int) -> list[Any]:
    """Keys in a sequence of bounded length, copied: whoever uses them is no part of the plugin."""
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes | bytearray):
        raise Nonsense(f"{type(answer).__name__}, not a sequence of keys")
    keys = list(islice(answer, most + 1))
    if len(keys) > most:
        raise Nonsense(f"more than {most} keys: there are not so many pages")
    for key in keys:
        hash(key)
    return keys


def role_evict(answer: Any, need: int, pool: EvictionPool) -> Sequence[Any]:
    """What the KV cache or the scheduler answers by default."""
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes | bytearray):
        raise Nonsense(f"{type(answer).__name__}, not a sequence of keys")
    return answer


def transfer_kv(answer: Any, transfers: Any) -> list[TransferEvent]:
    """Events, each of the right class."""
    events = list(islice(answer, 1_000_000)) if hasattr(answer, "__iter__") else [answer]
    if not all(isinstance(event, TransferEvent) and isinstance(event.transfer_id, str) for event in events):
        raise Nonsense("what are no transfer events")
    return events


def plan(answer: Any, step: Any) -> Plan:
    """A plan."""
    if isinstance(answer, Plan):
        return answer
    raise Nonsense(f"{type(answer).__name__}, not the plan that step.seal() gives")


def outcome(answer: Any, plan: Plan, who: str, width: int = 0) -> Outcome:
    """What an executor made of a plan: row by row, whole tokens, as many as the rows may yield.

    Raises ``ExecutionError`` in the executor's name: a step that answers nonsense has failed. ``width``: numbers of a
    hidden state.
    """
    try:
        if not isinstance(answer, Outcome) or answer.plan is not plan:
            raise Nonsense(f"{type(answer).__name__}, not the outcome of this plan")
        tokens = answer.tokens
        if len(tokens) != len(plan.requests):
            raise Nonsense(f"{len(tokens)} rows of tokens for a plan of {len(plan.requests)}")
        flat = list(chain.from_iterable(tokens))
        if type(sum(flat)) is not int:
            raise Nonsense("tokens that are no whole numbers")
        if answer.errors or plan.drafts or answer.proposals or len(flat) != plan.samples.count(True):
            _rows(answer, plan)
        if answer.logprobs or answer.prompt_logprobs:
            _logprobs(answer, plan)
        if plan.pooled or answer.pooled:
            _pooled(answer, plan, width)
    except Nonsense as error:
        raise ExecutionError(f"{who} answered {error}") from error
    except TypeError as error:
        raise ExecutionError(f"{who} answered tokens of a wrong type: {error}") from error
    return answer


def _rows(answer: Outcome, plan: Plan) -> None:
    for row, (request, samples, tokens) in enumerate(zip(plan.requests, plan.samples, answer.tokens, strict=True)):
        most = 1 + len(plan.drafts.get(request, ())) if samples else 0
        least = 1 if samples else 0
        if not least <= len(tokens) <= most and row not in answer.errors:
            raise Nonsense(f"{len(tokens)} tokens for row {row}, which yields {least} to {most}")
    for row in (*answer.errors, *answer.proposals):
        if type(row) is not int or not 0 <= row < len(plan.requests):
            raise Nonsense(f"something of row {_shown(row)}, of {len(plan.requests)}")
    for drafts in answer.proposals.values():
        if not isinstance(drafts, tuple) or not all(type(token) is int for token in drafts):
            raise Nonsense(f"drafts that are no tuple of whole numbers: {_shown(drafts)}")


def _logprobs(answer: Outcome, plan: Plan) -> None:
    for row in (*answer.logprobs, *answer.prompt_logprobs):
        if type(row) is not int or not 0 <= row < len(plan.requests):
            raise Nonsense(f"log-probabilities of row {_shown(row)}, of {len(plan.requests)}")
    for row, found in answer.logprobs.items():
        if len(found) != len(answer.tokens[row]):
            raise Nonsense(f"{len(found)} log-probabilities for the {len(answer.tokens[row])} tokens of row {row}")
    for row, found in answer.prompt_logprobs.items():
        want = max(0, min(plan.counts[row], plan.requests[row].num_prompt - 1 - plan.starts[row]))
        if len(found) != want:
            raise Nonsense(f"{len(found)} log-probabilities for the {want} prompt tokens that follow in row {row}")
    everything = chain(*answer.logprobs.values(), *answer.prompt_logprobs.values())
    if not all(isinstance(one, TokenLogprobs) for one in everything):
        raise Nonsense("log-probabilities that are no TokenLogprobs")


def _pooled(answer: Outcome, plan: Plan, width: int) -> None:
    for row in plan.pooled:
        expected = bool(plan.pooled_positions(row))
        if expected != (row in answer.pooled) and row not in answer.errors:
            raise Nonsense(f"{'no' if expected else 'a'} vector for row {row}")
    for row, vector in answer.pooled.items():
        if row not in plan.pooled:
            raise Nonsense(f"a vector for row {_shown(row)}, which does not pool")
        if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (width,):
            raise Nonsense(f"for row {row} {_shown(vector)}, no array of {width} float32 numbers")
        if not np.isfinite(vector).all():
            raise Nonsense(f"numbers that are not finite for row {row}: such a row fails")


def _shown(value: Any) -> str:
    """A value in few words, whatever its ``repr`` does."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return type(value).__name__
