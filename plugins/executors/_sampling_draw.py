"""Drawing tokens: temperature, top_k, top_p and min_p, then one uniform number a token (inverse transform).

What a row yields depends on that row alone, to the last bit: widths are chosen by its own parameters. Tokens are passed
in the order of their ids, so that two of nearly the same probability, whose order differs from one kernel to the next,
do not change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.sampling import SamplingParams

FORBIDDEN = float("-inf")
WIDTHS = (64, 1024)  # tokens looked at before a whole vocabulary is sorted
BLOCK = 256  # tokens whose masses are summed at once
BELOW_1 = 1 - 2.0**-53


class Filter(NamedTuple):
    """Parameters of rows, a column each."""

    top_k: Tensor  # [rows], int
    top_p: Tensor
    min_p: Tensor

    def rows(self, chosen: Tensor) -> Filter:
        """Those of some rows."""
        return Filter(*[column[chosen] for column in self])


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """Sample every row of ``logits [rows, vocab]`` (float32, not changed) by one number in [0, 1) each."""
    vocab = logits.shape[1]
    device = logits.device
    logits = logits / torch.tensor([[row.temperature] for row in params], device=device)
    uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
    limits = [row.top_k if 0 < row.top_k < vocab else vocab for row in params]
    groups: dict[int, list[int]] = {}
    for number, (row, limit) in enumerate(zip(params, limits, strict=True)):
        width = 0 if limit == vocab and row.top_p >= 1 else next((w for w in WIDTHS if limit <= w), max(WIDTHS))
        groups.setdefault(width, []).append(number)
    picked = [0] * len(params)
    for width, rows in groups.items():
        every = len(rows) == len(params)
        mine, numbers_of = (logits, uniform) if every else (logits[rows], uniform[rows])
        if width:
            wish = Filter(
                torch.tensor([limits[row] for row in rows], device=device),
                torch.tensor([params[row].top_p for row in rows], device=device),
                _min_p([params[row] for row in rows], device),
            )
            tokens = _pick_filtered(mine, wish, numbers_of, min(width, vocab))
        else:
            tokens = _pick_any(mine, [params[row] for row in rows], numbers_of)
        for place, token in zip(rows, tokens.tolist(), strict=True):
            picked[place] = token
    return picked


def _min_p(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """What a logit may lie below the highest one, at most, as a negative number ``[rows]``."""
    return torch.tensor([math.log(row.min_p) if row.min_p else FORBIDDEN for row in params], device=device)


def keep(logits: Tensor, wish: Filter, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest ``width`` tokens of each row, their masses, and where the filters leave them in: ``[rows, width]``.

    First the top_k likeliest stay, of these the smallest set with mass top_p, of these the ones above min_p (the order
    of transformers). Rows that have no answer within ``width`` are marked as incomplete by a mass of NaN.
    """
    values, ids = logits.topk(width)
    place = torch.arange(width, device=logits.device)
    within = place < wish.top_k[:, None]
    values = values.masked_fill(~within, FORBIDDEN)
    whole = wish.top_k <= width  # of these rows, every token that top_k leaves is among the values
    total = torch.where(whole, values.logsumexp(-1), logits.logsumexp(-1))
    mass = (values - total[:, None]).exp()
    reached = mass.cumsum(-1)
    # The mass of the likelier tokens decides, so the likeliest token always stays.
    inside = within & (reached - mass < wish.top_p[:, None]) & (values >= values[:, :1] + wish.min_p[:, None])
    if width < logits.shape[1]:
        limited = wish.top_k < logits.shape[1]  # such a set is not known before all of it is seen
        least = values[:, -1] < values[:, 0] + wish.min_p  # min_p ends it earlier
        wide = ~whole & (limited | (reached[:, -1] < wish.top_p)) & ~(least & ~limited)
        mass = mass.masked_fill(wide[:, None], float("nan"))
    return ids, mass, inside


def _pick_filtered(logits: Tensor, wish: Filter, uniform: Tensor, width: int) -> Tensor:
    """Sorting a whole vocabulary costs more than the rest of sampling together, and the set rarely has more than a few
    hundred tokens: the likeliest are looked at first, and only rows whose set is larger are sorted whole."""
    vocab = logits.shape[1]
    ids, mass, inside = keep(logits, wish, width)
    ids, order = ids.masked_fill(~inside, vocab).sort(dim=-1)
    weights = mass.masked_fill(~inside, 0.0).gather(1, order).double()
    picked = ids.gather(1, _place(weights, uniform)[:, None])[:, 0]
    wide = mass[:, 0].isnan()
    if width < vocab and bool(wide.any()):
        picked[wide] = _pick_filtered(logits[wide], wish.rows(wide), uniform[wide], vocab)
    return picked


def _pick_any(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """From the whole vocabulary: first the block of tokens, then the token in it."""
    rows, vocab = logits.shape
    highest = logits.amax(-1, keepdim=True)
    if any(row.min_p for row in params):
        logits = logits.masked_fill(logits < highest + _min_p(params, logits.device)[:, None], FORBIDDEN)
    mass = (logits - highest).exp_()
    mass = torch.nn.functional.pad(mass, (0, -vocab % BLOCK)).view(rows, -1, BLOCK)
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
