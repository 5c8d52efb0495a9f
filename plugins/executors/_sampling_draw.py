"""Drawing tokens: temperature, top_k, top_p and min_p, then one uniform number a token (inverse transform).

What a row yields depends on that row alone, to the last bit: widths are chosen by its own parameters. Tokens are passed
in the order of their ids, so that two of nearly the same probability, whose order differs from one kernel to the next,
do not change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.sampling import SamplingParams

FORBIDDEN = float("-inf")
FEW = 64  # likeliest tokens looked at, before all are
SLICE = 16  # rows worked on together: what is small enough stays in the processor's cache
BLOCK = 256  # tokens whose masses are summed at once
BELOW_1 = 1 - 2.0**-53


class Filter(NamedTuple):
    """What the filters of some rows are: a column each, ``[rows]``."""

    top_k: Tensor  # the vocabulary where it is off
    top_p: Tensor
    min_p: Tensor  # how far below the highest logit one may be, a negative number

    def rows(self, chosen: Tensor) -> Filter:
        """Those of some rows."""
        return Filter(*[column[chosen] for column in self])


Way = Callable[[Tensor, Filter, Tensor], Tensor]
Put = Callable[[Any, torch.dtype], Tensor]
"""Takes numbers to where logits are, without waiting."""


def draw(logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Sample these ``rows`` of ``logits [all rows, vocab]`` (float32, not changed) by one number in [0, 1) each."""
    vocab = logits.shape[1]
    groups: dict[Way, list[int]] = {}
    for place, wish in enumerate(params):
        groups.setdefault(_way(wish, vocab), []).append(place)
    picked = [0] * len(params)
    for way, members in groups.items():
        for start in range(0, len(members), SLICE):
            some = members[start : start + SLICE]
            wishes = [params[place] for place in some]
            mine = logits[[rows[place] for place in some]]  # a copy
            if any(wish.temperature != 1 for wish in wishes):
                mine /= torch.tensor([[wish.temperature] for wish in wishes], device=mine.device)
            uniform = torch.tensor([numbers[place] for place in some], dtype=torch.float64, device=mine.device)
            tokens = way(mine, filter_of(wishes, vocab, mine.device), uniform).tolist()
            for place, token in zip(some, tokens, strict=True):
                picked[place] = token
    return picked


def draw_ahead(
    logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], numbers: Sequence[float], put: Put
) -> Tensor:
    """As ``draw``, of rows that ``can_ahead``, the same tokens; they stay on the device, and nobody waits for it.

    A row of NaN yields some token of the vocabulary: what is launched on it must not reach beyond.
    """
    vocab = logits.shape[1]
    picked = put([0] * len(rows), torch.long)
    for everything in (True, False):
        places = [at for at, wish in enumerate(params) if (_way(wish, vocab) is _pick_any) == everything]
        if not places:
            continue
        wishes = [params[at] for at in places]
        mine = logits.index_select(0, put([rows[at] for at in places], torch.long))
        mine /= put([[wish.temperature] for wish in wishes], torch.float32)
        wish, uniform = _filter_by(put, wishes, vocab), put([numbers[at] for at in places], torch.float64)
        if everything:
            mine -= mine.amax(-1, keepdim=True)
            chosen = _pick_block(mine.masked_fill_(mine < wish.min_p[:, None], FORBIDDEN).exp_(), uniform)
        else:
            chosen, _ = _pick_few(mine, wish, uniform)
        picked.index_copy_(0, put(places, torch.long), chosen.clamp(max=vocab - 1))
    return picked


def can_ahead(wish: SamplingParams, vocab: int) -> bool:
    """Whether it is settled how a row is drawn before its logits are known: ``top_p`` may need the whole vocabulary."""
    return _top_k(wish, vocab) <= FEW or _way(wish, vocab) is _pick_any


def _way(wish: SamplingParams, vocab: int) -> Way:
    """How a row is drawn: by its own parameters alone."""
    limit = _top_k(wish, vocab)
    if limit == vocab and wish.top_p >= 1:
        return _pick_any
    return _pick_large if FEW < limit < vocab else _pick_likely


def _top_k(wish: SamplingParams, vocab: int) -> int:
    return wish.top_k if 0 < wish.top_k < vocab else vocab


def filter_of(params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Filter:
    """What the rows' filters are, in numbers that can be compared."""
    return _filter_by(lambda values, dtype: torch.tensor(values, dtype=dtype, device=device), params, vocab)


def _filter_by(put: Put, params: Sequence[SamplingParams], vocab: int) -> Filter:
    return Filter(
        put([_top_k(row, vocab) for row in params], torch.long),
        put([row.top_p for row in params], torch.float32),
        put([math.log(row.min_p) if row.min_p else FORBIDDEN for row in params], torch.float32),
    )


def keep(logits: Tensor, wish: Filter, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest ``width`` tokens of each row, their masses, and where the filters leave them in: ``[rows, width]``.

    First the top_k likeliest stay, of these the smallest set with mass top_p, of these the ones above min_p (the order
    of transformers). Rows that have no answer within ``width`` are marked by a mass of NaN.
    """
    values, ids = logits.topk(width)
    within = torch.arange(width, device=logits.device) < wish.top_k[:, None]
    values = values.masked_fill(~within, FORBIDDEN)
    whole = wish.top_k <= width  # of these rows, every token that top_k leaves is among the values
    total = torch.where(whole, values.logsumexp(-1), logits.logsumexp(-1))
    mass = (values - total[:, None]).exp()
    reached = mass.cumsum(-1)
    # The mass of the likelier tokens decides, so the likeliest token always stays.
    inside = within & (reached - mass < wish.top_p[:, None]) & (values >= values[:, :1] + wish.min_p[:, None])
    if width < logits.shape[1]:
        limited = wish.top_k < logits.shape[1]  # what such a set's mass is, is not known before all of it is seen
        ended = (reached[:, -1] >= wish.top_p) | (values[:, -1] < values[:, 0] + wish.min_p)
        mass = mass.masked_fill((~whole & (limited | ~ended))[:, None], float("nan"))
    return ids, mass, inside


def _pick_likely(logits: Tensor, wish: Filter, uniform: Tensor) -> Tensor:
    """The set rarely has more than a few tokens: they are looked at first, and all only where they do not do."""
    picked, mass = _pick_few(logits, wish, uniform)
    large = mass[:, 0].isnan()
    if bool(large.any()):
        picked[large] = _pick_large(logits[large], wish.rows(large), uniform[large])
    return picked


def _pick_few(logits: Tensor, wish: Filter, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """From the likeliest few; and their masses, which are NaN where those do not do."""
    vocab = logits.shape[1]
    ids, mass, inside = keep(logits, wish, min(FEW, vocab))
    ids, order = ids.masked_fill(~inside, vocab).sort(dim=-1)
    weights = mass.masked_fill(~inside, 0.0).gather(1, order).double()
    return ids.gather(1, _place(weights, uniform)[:, None])[:, 0], mass


def _pick_large(logits: Tensor, wish: Filter, uniform: Tensor) -> Tensor:
    return _pick_any(restrict(logits, wish), wish, uniform)


def restrict(logits: Tensor, wish: Filter) -> Tensor:
    """``logits`` with what top_k and top_p leave out forbidden. For sets of any size: equal logits stay or go together.

    Sorting the values alone costs a tenth of sorting them with their places.
    """
    vocab = logits.shape[1]
    values = _sorted(logits)
    values = values.masked_fill(torch.arange(vocab, device=logits.device) >= wish.top_k[:, None], FORBIDDEN)
    mass = values.softmax(-1)
    count = (mass.cumsum(-1) - mass < wish.top_p[:, None]).sum(-1, keepdim=True)
    count = torch.minimum(count, wish.top_k[:, None])
    return logits.masked_fill(logits < values.gather(1, count - 1), FORBIDDEN)


def _sorted(logits: Tensor) -> Tensor:
    """The values of each row, highest first."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, ::-1].copy())
    return logits.sort(dim=-1, descending=True).values


def _pick_any(logits: Tensor, wish: Filter, uniform: Tensor) -> Tensor:
    """From the whole vocabulary. Mutates ``logits``."""
    logits -= logits.amax(-1, keepdim=True)
    if bool((wish.min_p > FORBIDDEN).any()):
        logits.masked_fill_(logits < wish.min_p[:, None], FORBIDDEN)
    return _pick_block(logits.exp_(), uniform)


def _pick_block(mass: Tensor, uniform: Tensor) -> Tensor:
    """First the block of tokens, then the token in it."""
    rows, vocab = mass.shape
    if vocab % BLOCK:
        mass = torch.nn.functional.pad(mass, (0, -vocab % BLOCK))
    mass = mass.view(rows, -1, BLOCK)
    sums = mass.sum(-1).double()
    block = _place(sums, uniform)[:, None]
    reached = sums.cumsum(-1)
    rest = (uniform * reached[:, -1])[:, None] - (reached.gather(1, block) - sums.gather(1, block))
    part = (rest / sums.gather(1, block)).clamp(0.0, BELOW_1)[:, 0]
    inside = mass[torch.arange(rows, device=mass.device), block[:, 0]].double()
    return block[:, 0] * BLOCK + _place(inside, part)


def _place(weights: Tensor, uniform: Tensor) -> Tensor:
    """For each row of ``weights [rows, n]`` (float64, not negative), the place that a number in [0, 1) falls on."""
    reached = weights.cumsum(-1)
    target = uniform * reached[:, -1]
    return (reached <= target[:, None]).sum(-1).clamp_(max=weights.shape[1] - 1)
