"""The code of a new attention backend. ``@WORD@`` is filled in."""

from __future__ import annotations

ATTENTION = '''
"""@NAME@: an attention backend over paged KV. It reads what each row owns, and nothing else."""

import torch

from engine.core import Attention


class @CLASS@(Attention):
    """Row by row, as the definition says. Put a kernel here."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})

    def plan_batch(self, batch):
        """Once a step, for all layers: the slots (page * page_size + offset) that each row reads and writes."""
        self._rows, written, first = [], [], 0
        for start, count, pages in zip(batch.starts, batch.counts, batch.pages):
            places = torch.arange(start + count)
            table = torch.tensor(list(pages))
            slots = (table[places // batch.page_size] * batch.page_size + places % batch.page_size).to(batch.device)
            sees = places[None] <= torch.arange(start, start + count)[:, None]  # itself and all before it
            self._rows.append((first, first + count, slots, sees.to(batch.device)))
            written.append(slots[start:])
            first += count
        self._written = torch.cat(written)

    def write(self, keys, values, k_pages, v_pages):
        """The new K and V of all rows, before any row attends."""
        k_pages.flatten(0, 1)[self._written] = keys
        v_pages.flatten(0, 1)[self._written] = values

    def attend(self, query, k_pages, v_pages, scale):
        """The answer is new: [tokens, heads, head_dim], as the query."""
        out = torch.empty_like(query)
        share = query.shape[1] // k_pages.shape[2]  # query heads that read one KV head
        for first, last, slots, sees in self._rows:
            k, v = (side.flatten(0, 1)[slots].float().repeat_interleave(share, 1) for side in (k_pages, v_pages))
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * scale
            weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out
'''
