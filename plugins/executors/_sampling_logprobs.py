"""Log-probabilities of tokens in the model's own distribution: before biases, penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.core.sampling import TokenLogprobs

SLICE = 16  # rows worked on together: a prompt's logits are many, and few stay in the processor's cache


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Of ``tokens[i]`` and its ``counts[i]`` likeliest rivals in row i of ``logits [rows, vocab]``. Does not mutate."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), SLICE):
        part = slice(start, start + SLICE)
        found += _some(logits[part].float(), tokens[part], counts[part])
    return found


def _some(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen)
    ranks = ((logits > own).sum(-1) + 1).tolist()
    values, ids = logits.topk(min(max(counts), logits.shape[1]))
    found = ids.tolist(), (values - total).tolist()
    rows = zip(tokens, (own - total)[:, 0].tolist(), ranks, counts, *found, strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(top[:count]), tuple(of_top[:count]))
        for token, logprob, rank, count, top, of_top in rows
    ]
