"""Attention backends that are broken on purpose, each in one way, and the one that is not."""

from __future__ import annotations

import torch

from engine.core import Attention


class Plain(Attention):
    """Row by row, as the definition says."""

    name = "plain"

    def plan_batch(self, batch):
        """What each row reads, and where it writes."""
        self.rows, written, first = [], [], 0
        for start, count, pages in zip(batch.starts, batch.counts, batch.pages, strict=True):
            places = torch.arange(self.length(start, count, batch.page_size))
            slots = self.slots(places, torch.tensor(list(pages)), batch.page_size)
            mask = places[None] <= self.sees(torch.arange(start, start + count))[:, None]
            self.rows.append((first, first + count, slots, mask))
            written.append(slots[start : start + count])
            first += count
        self.written = torch.cat(written)

    def write(self, keys, values, k_pages, v_pages):
        """Into the planned slots."""
        k_pages.flatten(0, 1)[self.written] = keys
        v_pages.flatten(0, 1)[self.written] = values

    def attend(self, query, k_pages, v_pages, scale):
        """A new tensor, all of it written."""
        out = torch.empty_like(query)
        for row in self.rows:
            self.row(out, query, k_pages.flatten(0, 1), v_pages.flatten(0, 1), scale, *row)
        return out

    def row(self, out, query, keys, values, scale, first, last, slots, mask):
        """One row's answer."""
        heads = self.heads(query.shape[1], keys.shape[1])
        k, v = keys[slots][:, heads].float(), values[slots][:, heads].float()
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * scale
        weights = self.weights(scores.masked_fill(~mask, -torch.inf))
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)

    # ---- what the others get wrong

    def length(self, start, count, size):
        return start + count

    def slots(self, places, table, size):
        return table[places // size] * size + places % size

    def sees(self, places):
        return places

    def heads(self, heads, kv_heads):
        return torch.arange(heads) // (heads // kv_heads)

    def weights(self, scores):
        return scores.softmax(-1)


class ReadsWholePages(Plain):
    """The last page is read to its end, whoever wrote there."""

    def length(self, start, count, size):
        return -(-(start + count) // size) * size

    def sees(self, places):
        return torch.where(places == places.max(), 10**6, places)


class IgnoresThePageTable(Plain):
    """Pages are taken to lie one after the other."""

    def slots(self, places, table, size):
        return table[0] * size + places

    def write(self, keys, values, k_pages, v_pages):
        """Where the table says, so that only reading is wrong."""
        k_pages.flatten(0, 1)[self.right] = keys
        v_pages.flatten(0, 1)[self.right] = values

    def plan_batch(self, batch):
        """The right slots, too."""
        super().plan_batch(batch)
        right = []
        for start, count, pages in zip(batch.starts, batch.counts, batch.pages, strict=True):
            right += [pages[at // batch.page_size] * batch.page_size + at % batch.page_size
                      for at in range(start, start + count)]  # fmt: skip
        self.right = torch.tensor(right)
        limit = (max(max(pages) for pages in batch.pages) + 1) * batch.page_size - 1
        self.rows = [(first, last, slots.clamp(max=limit), mask) for first, last, slots, mask in self.rows]


class InterleavesHeads(Plain):
    """Query head h reads KV head h modulo their number."""

    def heads(self, heads, kv_heads):
        return torch.arange(heads) % kv_heads


class SeesOneTooMany(Plain):
    """The mask of a prompt is one too wide."""

    def sees(self, places):
        return places + 1


class DoesNotSeeItself(Plain):
    """The mask is one too narrow, but for the first position, which would see nothing."""

    def sees(self, places):
        return (places - 1).clamp(min=0)


class ForgetsTheContext(Plain):
    """A chunk's mask begins at the chunk, as if it were a prompt."""

    def sees(self, places):
        return places - places[0] if len(places) > 1 else places


class WritesFromTheFirstPage(Plain):
    """New tokens go to the beginning of the row."""

    def plan_batch(self, batch):
        """Slots of the wrong positions."""
        super().plan_batch(batch)
        counts = [last - first for first, last, _, _ in self.rows]
        self.written = torch.cat([slots[:count] for (_, _, slots, _), count in zip(self.rows, counts, strict=True)])


class MixesRows(Plain):
    """Adds a little of the row before, weighted with zero."""

    def row(self, out, query, keys, values, scale, first, last, slots, mask):
        """NaN times zero is NaN."""
        super().row(out, query, keys, values, scale, first, last, slots, mask)
        other = self.rows[0][2] if first else self.rows[-1][2]
        if len(self.rows) > 1 and not values[slots].isnan().any():
            out[first:last] += values[other].sum() * 0


class LeavesTheLastRowOut(Plain):
    """Decodes are answered in pairs; the odd one is forgotten."""

    def attend(self, query, k_pages, v_pages, scale):
        """All rows but the last."""
        rows, self.rows = self.rows, self.rows[: len(self.rows) // 2 * 2]
        try:
            return super().attend(query, k_pages, v_pages, scale)
        finally:
            self.rows = rows


class ScalesTheQuery(Plain):
    """Saves a tensor by scaling the query where it lies."""

    def attend(self, query, k_pages, v_pages, scale):
        """In place."""
        query *= scale
        return super().attend(query, k_pages, v_pages, 1.0)


class Overflows(Plain):
    """exp without taking the largest off first."""

    def weights(self, scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


class PlansOnce(Plain):
    """A batch with as many rows as the last one is taken to be the last one."""

    def plan_batch(self, batch):
        """Only where the number of rows is another one."""
        if len(getattr(self, "rows", ())) != len(batch.starts):
            super().plan_batch(batch)


class HasItsOwnScale(Plain):
    """Knows better than the caller."""

    def attend(self, query, k_pages, v_pages, scale):
        """As is usual."""
        return super().attend(query, k_pages, v_pages, query.shape[-1] ** -0.5)


class Jitters(Plain):
    """Adds what it adds in another order each time."""

    def attend(self, query, k_pages, v_pages, scale):
        """Within the tolerance."""
        return super().attend(query, k_pages, v_pages, scale) + torch.rand(1) * 1e-6


class DependsOnCompany(Plain):
    """Rounds otherwise in large batches."""

    def attend(self, query, k_pages, v_pages, scale):
        """Within the tolerance."""
        return super().attend(query, k_pages, v_pages, scale) * (1 + 1e-6 * (len(self.rows) > 1))


# ---- what need not be able to be done


class Featured(Plain):
    """All of it, as the definition says."""

    provides = frozenset({"attention:window", "attention:soft-cap", "attention:fp8-kv"})

    def plan_batch(self, batch):
        """Where each query stands, too."""
        super().plan_batch(batch)
        self.starts = list(batch.starts)

    def write(self, keys, values, k_pages, v_pages):
        """Rounded, where the pages are narrower."""
        stored = [self.stored(side, pages) for side, pages in ((keys, k_pages), (values, v_pages))]
        super().write(*stored, k_pages, v_pages)

    def attend(self, query, k_pages, v_pages, scale, window=None, soft_cap=None):
        """With what this layer has."""
        self.window, self.soft_cap = window, soft_cap
        wide = (side.to(query.dtype) if side.dtype != query.dtype else side for side in (k_pages, v_pages))
        return super().attend(query, *wide, scale)

    def row(self, out, query, keys, values, scale, first, last, slots, mask):
        """The mask is narrower where there is a window."""
        count, length = last - first, len(slots)
        if self.window is not None:
            mask = mask & torch.ones(count, length, dtype=torch.bool).triu(
                length - count - self.within(self.window) + 1
            )
        super().row(out, query, keys, values, scale, first, last, slots, mask)

    def weights(self, scores):
        """Capped; what was hidden stays so."""
        if self.soft_cap is not None:
            scores = self.capped(scores, self.soft_cap).masked_fill(scores.isinf(), -torch.inf)
        return super().weights(scores)

    # ---- what the others get wrong

    def within(self, window):
        return window

    def capped(self, scores, cap):
        return (scores / cap).tanh() * cap

    def stored(self, side, pages):
        if pages.dtype == side.dtype:
            return side
        return side.float().clamp(-448, 448).to(pages.dtype)


class WindowsAreOneTooWide(Featured):
    """As where windows are counted without the query itself."""

    def within(self, window):
        return window + 1


class CapsAfterTheFact(Featured):
    """Cuts instead of bending."""

    def capped(self, scores, cap):
        return scores.clamp(-cap, cap)


class CapsEveryLayer(Featured):
    """Once told of a cap, it keeps to it."""

    def attend(self, query, k_pages, v_pages, scale, window=None, soft_cap=None):
        """With what a layer before had."""
        self.known = soft_cap or getattr(self, "known", None)
        return super().attend(query, k_pages, v_pages, scale, window, self.known)


class RoundsTowardsZero(Featured):
    """Drops the bits that do not fit."""

    def stored(self, side, pages):
        near = super().stored(side, pages)
        if near.dtype == side.dtype:
            return near
        lower = (near.view(torch.uint8) - 1).view(pages.dtype)
        return torch.where(near.float().abs() > side.float().abs(), lower.float(), near.float()).to(pages.dtype)


class Overshoots(Featured):
    """What is too large for fp8 becomes no number."""

    def stored(self, side, pages):
        near = super().stored(side, pages)
        return (
            near if near.dtype == side.dtype else near.float().masked_fill(side.float().abs() > 448, torch.nan).to(near)
        )


class ForgetsTheWindow(Featured):
    """Sees everything."""

    def within(self, window):
        return 10**6
