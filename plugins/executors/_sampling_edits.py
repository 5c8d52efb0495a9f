"""What changes logits before anything is chosen: grammars, biases, what is forbidden yet, penalties. Only where asked.

Penalties follow from a request's tokens alone. Of those that are committed, counts are kept from step to step (they
only ever grow); tokens that a step in flight has sampled are added for one step. So nothing is to be taken back when a
request is preempted, a step fails or drafts are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.grammar import Words, unpacked
from engine.core.request import Request
from engine.core.sampling import SamplingParams

FORBIDDEN = float("-inf")
Ids = NDArray[np.int64]
Counts = NDArray[np.float32]


class History(NamedTuple):
    """The different tokens of prompt and output so far, and how often each is in the output. ``[n]`` both."""

    ids: Ids
    counts: Counts


class Edits(NamedTuple):
    """What changes one row: bias by token id, ids that are forbidden, what the penalties count, a grammar's mask."""

    bias: tuple[Ids, Counts] | None = None
    banned: tuple[int, ...] = ()
    history: History | None = None
    mask: Words | None = None


NOTHING = Edits()


class _Memory:
    """The committed tokens of one request, counted; and its bias as arrays."""

    def __init__(self, request: Request) -> None:
        self.upto = 0
        bias = request.params.logit_bias
        self.bias = (np.fromiter(bias, np.int64), np.fromiter(bias.values(), np.float32)) if bias else None
        self._places: dict[int, int] = {}
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)
        self._first = request.num_prompt

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens from ``upto`` on are committed. Mutates."""
        prompt = tokens[: max(0, self._first - self.upto)]
        if prompt:
            self._extend([int(token) for token in np.unique(np.array(prompt, np.int64)) if token not in self._places])
        self._count(tokens[len(prompt) :])
        self.upto += len(tokens)

    def history(self, pending: Sequence[int]) -> History:
        """All of it, with output tokens that are not committed yet. Does not mutate."""
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        if not pending:
            return History(ids, counts)
        counts = counts.copy()
        new: dict[int, int] = {}
        for token in pending:
            if (place := self._places.get(token)) is not None:
                counts[place] += 1
            else:
                new[token] = new.get(token, 0) + 1
        return History(
            np.concatenate([ids, np.fromiter(new, np.int64)]),
            np.concatenate([counts, np.array([*new.values()], np.float32)]),
        )

    def _count(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self._places:
                self._extend([token])
            self._counts[self._places[token]] += 1

    def _extend(self, tokens: Sequence[int]) -> None:
        size = len(self._places)
        if size + len(tokens) > len(self._ids):
            room = np.zeros(size + 2 * len(tokens) + 64, np.float32)
            room[:size] = self._counts[:size]
            self._counts = room
            self._ids = np.concatenate([self._ids[:size], np.zeros(len(room) - size, np.int64)])
        self._ids[size : size + len(tokens)] = tokens
        self._places.update(zip(tokens, range(size, size + len(tokens)), strict=True))


class Editor:
    """Knows what changes each request's logits. Keeps counts of those that use penalties, while they live."""

    def __init__(self) -> None:
        self._known: dict[Request, _Memory] = {}

    def edits(self, request: Request, position: int, committed: int, pending: Sequence[int]) -> Edits:
        """What changes the logits of the token at ``position``. Mutates what is remembered.

        Args:
            committed: so many tokens of the request are certain.
            pending: tokens after those, which a step in flight has sampled.

        Raises:
            GrammarError: the request's grammar cannot be followed.
        """
        guide, params = request.guide, request.params
        mask = None if guide is None else guide.allowed(request.tokens, request.num_prompt, committed, pending)
        banned = tuple(request.stop_ids) if position - request.num_prompt < params.min_tokens else ()
        if not (params.logit_bias or params.penalised):
            return NOTHING if not banned and mask is None else Edits(banned=banned, mask=mask)
        memory = self._known.get(request)
        if memory is None or memory.upto > committed:
            self._known = {known: kept for known, kept in self._known.items() if not known.finished}
            memory = self._known[request] = _Memory(request)
        history = None
        if params.penalised:
            memory.add(request.tokens[memory.upto : committed])
            history = memory.history(pending)
        return Edits(memory.bias, banned, history, mask)


def apply(logits: Tensor, edits: Sequence[Edits], params: Sequence[SamplingParams]) -> None:
    """Change ``logits [rows, vocab]`` (float32, contiguous) in place: masks, biases, what is forbidden, penalties."""
    vocab = logits.shape[1]
    _mask(logits, edits)
    flat = logits.view(-1)
    biased = [(row, each.bias) for row, each in enumerate(edits) if each.bias is not None]
    if biased:
        at = _tensor(np.concatenate([ids + row * vocab for row, (ids, _) in biased]), logits)
        flat[at] += _tensor(np.concatenate([values for _, (_, values) in biased]), logits)
    banned = [row * vocab + token for row, each in enumerate(edits) for token in each.banned]
    if banned:
        flat[torch.tensor(banned, device=logits.device)] = FORBIDDEN
    counted = [(row, each.history) for row, each in enumerate(edits) if each.history is not None]
    if counted:
        _penalise(flat, vocab, counted, params)


def _mask(logits: Tensor, edits: Sequence[Edits]) -> None:
    """Forbid what grammars do not allow, in their rows."""
    masked = [(row, each.mask) for row, each in enumerate(edits) if each.mask is not None]
    if not masked:
        return
    rows = [row for row, _ in masked]
    packed, vocab = np.stack([mask for _, mask in masked]), logits.shape[1]
    if logits.device.type == "cpu":
        allowed = torch.from_numpy(unpacked(packed, vocab))
    else:  # the words travel, not the truths
        words = torch.from_numpy(packed).to(logits.device)
        shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
        allowed = ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab]
    logits[rows] = logits[rows].masked_fill_(~allowed, FORBIDDEN)


def _penalise(
    flat: Tensor, vocab: int, counted: Sequence[tuple[int, History]], params: Sequence[SamplingParams]
) -> None:
    sizes = [len(history.ids) for _, history in counted]
    wishes = [params[row] for row, _ in counted]
    at = _tensor(np.concatenate([history.ids + row * vocab for row, history in counted]), flat)
    counts = _tensor(np.concatenate([history.counts for _, history in counted]), flat)

    def each(values: Sequence[float]) -> Tensor:
        return _tensor(np.repeat(np.array(values, np.float32), sizes), flat)

    repetition = each([wish.repetition_penalty for wish in wishes])
    found = flat[at]
    found = torch.where(found > 0, found / repetition, found * repetition)
    found -= each([wish.frequency_penalty for wish in wishes]) * counts
    found -= each([wish.presence_penalty for wish in wishes]) * (counts > 0)
    flat[at] = found


def _tensor(array: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
