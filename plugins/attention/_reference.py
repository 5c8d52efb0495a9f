"""The reference attention backend: exact, and simple enough to be believed.

Prefill rows run one by one. Decode rows (one token each) run together: rows of similar length share a padded gather.
A padded place repeats a position of its own row, so memory that the row does not own is never read: whatever garbage
(NaN included) lies in unused pages, or behind the end of the last page, cannot reach a result.

Idea of the paged layout: vLLM (Kwon et al., 2023, "Efficient Memory Management for LLM Serving with PagedAttention").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.batch import Batch

GROUP_SLACK = 64  # rows up to this much shorter than the longest of a group are always padded to it: calls cost too


class _Prefill(NamedTuple):
    """One row of several tokens: its query rows, slots of its whole context, mask ``[count, context]``."""

    first: int
    last: int
    slots: Tensor
    mask: Tensor | None  # None: square and causal

    def windowed(self, window: int) -> Tensor:
        """The mask where a query sees so many keys, itself included."""
        count, length = self.last - self.first, self.slots.shape[0]
        causal = _causal_mask(length - count, count, self.slots.device)
        return causal.triu(length - count - window + 1)


class _Decode(NamedTuple):
    """Rows of one token each: query rows ``[rows]``, slots ``[rows, longest]``, mask ``[rows, 1, 1, longest]``."""

    queries: Tensor
    slots: Tensor
    mask: Tensor | None  # None: all rows are equally long
    lengths: Tensor

    def windowed(self, window: int) -> Tensor:
        """The mask where a query sees so many keys, itself included."""
        places = torch.arange(self.slots.shape[1], device=self.slots.device)
        ends = self.lengths[:, None]
        return ((places < ends) & (places >= ends - window))[:, None, None, :]


class PagedAttention:
    """Causal attention over paged K and V in plain torch operations (``scaled_dot_product_attention``).

    Handles batches that mix prefill chunks and decodes, grouped-query attention, any page size and any order of pages.
    Mutates K and V pages in ``write`` only.
    """

    def __init__(self) -> None:
        self._write_slots = torch.empty(0, dtype=torch.long)
        self._prefills: list[_Prefill] = []
        self._decodes: list[_Decode] = []
        self._windows: dict[tuple[int, int], Tensor] = {}  # masks by row or group, and window

    def plan_batch(self, batch: Batch) -> None:
        """Build the index tensors of a step, once for all layers. Replaces those of the step before."""
        slots = _slots(batch)
        written: list[Tensor] = []
        decodes: list[tuple[int, int]] = []  # (context length, row)
        self._prefills, self._windows, first = [], {}, 0
        firsts: list[int] = []
        for row, (start, count) in enumerate(zip(batch.starts, batch.counts, strict=True)):
            written.append(slots[row][start : start + count])
            firsts.append(first)
            if count == 1:
                decodes.append((start + 1, row))
            else:
                mask = _causal_mask(start, count, batch.device) if start else None
                self._prefills.append(_Prefill(first, first + count, slots[row], mask))
            first += count
        self._write_slots = torch.cat(written) if written else torch.empty(0, dtype=torch.long)
        self._decodes = [_decode_group(group, slots, firsts, batch.device) for group in group_by_length(decodes)]

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where ``plan_batch`` says. Mutates the pages.

        Rows that share a page in one step write equal content to it, so the order between them does not matter.
        """
        k_pages.flatten(0, 1).index_copy_(0, self._write_slots, keys)
        v_pages.flatten(0, 1).index_copy_(0, self._write_slots, values)

    def attend(
        self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, window: int | None, soft_cap: float | None
    ) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        kv_heads = k_pages.shape[2]
        keys, values = k_pages.flatten(0, 1).flatten(1), v_pages.flatten(0, 1).flatten(1)
        out = query.new_empty(query.shape[0], query.shape[1], v_pages.shape[3])
        for row in self._prefills:
            gathered = (F.embedding(row.slots, side).unflatten(1, (kv_heads, -1)) for side in (keys, values))
            k, v = (side.transpose(0, 1).unsqueeze(0) for side in gathered)
            q = query[row.first : row.last].transpose(0, 1).unsqueeze(0)
            heads = _dense(q, k, v, self._mask(row, window), scale, soft_cap, causal=True)
            out[row.first : row.last] = heads[0].transpose(0, 1)
        for group in self._decodes:
            k, v = (
                F.embedding(group.slots, side).unflatten(2, (kv_heads, -1)).transpose(1, 2) for side in (keys, values)
            )
            # The query heads that share a KV head stand where a sequence would have its queries: no K or V is repeated.
            q = query[group.queries].unflatten(1, (kv_heads, -1))
            heads = _dense(q, k, v, self._mask(group, window), scale, soft_cap)
            out[group.queries] = heads.flatten(1, 2)
        return out

    def _mask(self, rows: _Prefill | _Decode, window: int | None) -> Tensor | None:
        """Made once a step for all layers with this window."""
        if window is None:
            return rows.mask
        key = id(rows), window
        if key not in self._windows:
            self._windows[key] = rows.windowed(window)
        return self._windows[key]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float | None, causal: bool = False
) -> Tensor:
    """Attention without pages, ``[rows, heads, tokens, dim]``. ``causal``: no mask means a square, causal one."""
    causal = causal and mask is None
    if soft_cap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
    share = q.shape[1] // k.shape[1]
    k, v = (side.repeat_interleave(share, dim=1) if share > 1 else side for side in (k, v))
    if causal:
        mask = _causal_mask(0, q.shape[2], q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2) * (scale / soft_cap)).tanh() * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def group_by_length(rows: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split ``(length, row)`` pairs into groups whose padding is bounded: none is padded to more than twice its length.

    Rows within ``GROUP_SLACK`` of the longest are an exception, since a call of its own costs more than that padding.
    """
    groups: list[list[tuple[int, int]]] = []
    for length, row in sorted(rows, reverse=True):
        longest = groups[-1][0][0] if groups else 0
        if groups and (length * 2 >= longest or longest - length <= GROUP_SLACK):
            groups[-1].append((length, row))
        else:
            groups.append([(length, row)])
    return groups


def _slots(batch: Batch) -> list[Tensor]:
    """Per row, the slot (page * page_size + offset) of each position of its context, ``[start + count]``."""
    size = batch.page_size
    offsets = torch.arange(size)
    result = []
    for start, count, pages in zip(batch.starts, batch.counts, batch.pages, strict=True):
        length = start + count
        table = torch.tensor(pages[: -(-length // size)], dtype=torch.long)
        slots = (table[:, None] * size + offsets).flatten()[:length] if size > 1 else table
        if slots.shape[0] < length:
            raise ValueError(f"a row of {length} tokens has {len(pages)} pages of {size}")
        result.append(slots.to(batch.device))
    return result


def _causal_mask(start: int, count: int, device: Any) -> Tensor:
    """True where query i (position ``start + i``) may look: ``[count, start + count]``."""
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)


def _decode_group(group: list[tuple[int, int]], slots: list[Tensor], firsts: list[int], device: Any) -> _Decode:
    longest = group[0][0]
    padded = torch.stack([_pad(slots[row], longest) for _, row in group])
    lengths = torch.tensor([length for length, _ in group], device=device)
    queries = torch.tensor([firsts[row] for _, row in group], device=device)
    if int(lengths.min()) == longest:
        return _Decode(queries, padded, None, lengths)
    mask = torch.arange(longest, device=device) < lengths[:, None]
    return _Decode(queries, padded, mask[:, None, None, :], lengths)


def _pad(slots: Tensor, length: int) -> Tensor:
    """The row's slots, its first one repeated up to ``length``."""
    missing = length - slots.shape[0]
    return torch.cat((slots, slots[:1].expand(missing))) if missing else slots
