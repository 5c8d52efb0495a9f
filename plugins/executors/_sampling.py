"""Choosing tokens from logits, a whole batch at a time.

Random numbers depend on nothing but a request's seed and the position of the token, so a seeded request yields the same
tokens alone, in any batch, in any order of steps, and after a preemption. A token is drawn by the Gumbel-max trick
(Gumbel, 1954): the argmax of ``logits / temperature + noise``, the noise belonging to the token id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.request import Request, SamplingParams

Largest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What finds the largest number of each row, as ``largest`` does."""

FORBIDDEN = float("-inf")
FEW = 1024  # tokens looked at before a whole vocabulary is sorted


class Draw(NamedTuple):
    """One row to sample: its parameters, the seed of its request, the position of the token, ids not allowed yet."""

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()


def draw_for(request: Request, position: int, engine_seed: int) -> Draw:
    """What sampling needs to know of a request whose token at ``position`` is wanted. Does not mutate."""
    params = request.params
    seed = params.seed
    if seed is None:
        seed = mix(engine_seed, request.arrival_index)
    banned = tuple(request.stop_ids) if position - request.num_prompt < params.min_tokens else ()
    return Draw(params, seed, position, banned)


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row, and where it first is; NaN where a row holds one."""
    best, tokens = logits.max(dim=-1)  # max passes NaN on
    return best, tokens


def sample(logits: Tensor, draws: Sequence[Draw], largest: Largest = largest) -> tuple[list[int], list[int]]:
    """Choose a token for each row of ``logits [rows, vocab]``. Mutates ``logits`` where ids are banned.

    Returns the tokens, and the indices of rows whose logits hold NaN (their token means nothing). Rows that are greedy
    cost one argmax whatever the others want.
    """
    for row, draw in enumerate(draws):
        if draw.banned:
            logits[row, list(draw.banned)] = FORBIDDEN
    best, tokens = largest(logits)
    bad = [row for row, value in enumerate(best.tolist()) if value != value]
    chosen: list[int] = tokens.tolist()
    drawn = [row for row, draw in enumerate(draws) if not draw.params.greedy and row not in bad]
    if drawn:
        picked = _draw(logits[drawn].float(), [draws[row] for row in drawn])
        for row, token in zip(drawn, picked, strict=True):
            chosen[row] = token
    return chosen, bad


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample every row of ``logits [rows, vocab]``, a copy that may be changed."""
    vocab = logits.shape[1]
    logits /= torch.tensor([[draw.params.temperature] for draw in draws])
    limits = [draw.params.top_k if 0 < draw.params.top_k < vocab else vocab for draw in draws]
    filtered = [row for row, draw in enumerate(draws) if limits[row] < vocab or draw.params.top_p < 1]
    if filtered:
        top_p = torch.tensor([draws[row].params.top_p for row in filtered])
        logits[filtered] = _filter(logits[filtered], torch.tensor([limits[row] for row in filtered]), top_p)
    logits += torch.from_numpy(np.stack([gumbel(draw.seed, draw.position, vocab) for draw in draws]))
    picked: list[int] = logits.argmax(dim=-1).tolist()
    return picked


def _filter(logits: Tensor, top_k: Tensor, top_p: Tensor, few: int = FEW) -> Tensor:
    """Forbid what is outside the ``top_k`` likeliest tokens, then outside the smallest set with mass ``top_p``.

    Sorting a whole vocabulary costs more than the rest of sampling together, and the set rarely has more than a few
    hundred tokens: the ``few`` likeliest are looked at first, and only rows whose set is larger are sorted whole.
    """
    width = min(int(top_k.max()), few)
    values, ids = logits.topk(width)
    values = values.masked_fill(torch.arange(width) >= top_k[:, None], FORBIDDEN)
    inside = top_k <= width  # of these rows, every token that top_k leaves is among the values
    total = torch.where(inside, values.logsumexp(-1), logits.logsumexp(-1))
    mass = (values - total[:, None]).exp()
    reached = mass.cumsum(dim=-1)
    # The mass of the likelier tokens decides, so the likeliest token always stays.
    values = values.masked_fill(reached - mass >= top_p[:, None], FORBIDDEN)
    result = torch.full_like(logits, FORBIDDEN).scatter_(1, ids, values)
    wide = ~inside & ((top_k < logits.shape[1]) | (reached[:, -1] < top_p))  # the total, or the set, is not known yet
    if wide.any():
        result[wide] = _filter(logits[wide], top_k[wide], top_p[wide], few=logits.shape[1])
    return result


def gumbel(seed: int, position: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """``count`` independent Gumbel numbers that depend on ``seed`` and ``position`` alone (Philox counters)."""
    generator = np.random.Generator(np.random.Philox(key=mix(seed, position)))
    noise = generator.standard_exponential(count, dtype=np.float32)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def mix(*numbers: int) -> int:
    """A 64-bit number that depends on all of ``numbers`` and is the same in every process."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
