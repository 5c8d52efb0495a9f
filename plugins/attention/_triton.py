"""The computing part of backend ``triton``: index tensors on the device, and launches of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.batch import AttentionLayer, Batch
from engine.core.errors import ConfigError
from engine.plugins.attention import _triton_kernels as kernels
from engine.plugins.attention._rows import Ints, Rows, rows_of
from engine.plugins.attention._triton_blocks import (
    ALIGN,
    LOG2E,
    Variant,
    attend_sizes,
    height,
    merge_sizes,
    write_sizes,
)
from engine.plugins.attention._triton_plan import (
    ITEM,
    MERGE,
    Kind,
    Pieces,
    padded,
    pieces_of,
    tiles_of,
)
from engine.plugins.attention._triton_staging import Staging, packed

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
MOST_PARTS = 2**30  # bytes
FLOAT8 = torch.float8_e4m3fn
FUSED: dict[str, Any] = {} if kernels.INTERPRETED else {"enable_fp_fusion": True}  # later Tritons do not by default


WARM = 17  # queries of a chunk: one more than narrow tiles take


class Launch(NamedTuple):
    """Items that are worked on with the same tiles: narrow ones (decodes, a few drafts) or wide ones (prompts)."""

    wide: bool
    items: Tensor
    merges: Tensor
    parts: int


@dataclass(slots=True)
class Step:
    """A planned batch on the device. ``rows`` is ``None`` where a graph is planned: nothing is added to it then."""

    slots: Tensor
    pages: Tensor
    page_size: int
    work: dict[Kind, list[Launch]] = field(default_factory=dict)
    rows: Rows | None = None


class Place(NamedTuple):
    """The index tensors of one graph: they stay where they are."""

    indices: Tensor
    step: Step


class Paged:
    """Causal attention by Triton's kernels. Mutates K and V pages in ``write`` only. One stream, one thread.

    Args:
        device: where everything is.
        processors: multiprocessors of the device.
        split: keys of a piece; ``None``: as the batch needs it.
    """

    def __init__(self, device: torch.device, processors: int, split: int | None) -> None:
        self._device, self._processors, self._split = device, processors, split
        self._staging = Staging(device)
        self._kinds: list[Kind] = []
        self._v_dim = 0
        self._step: Step | None = None
        self._places: dict[int, Place] = {}
        self._tables = torch.empty(0, dtype=torch.int32)  # the page tables of all graphs
        self._longest = 0  # tokens of a request

    def expect(self, layers: Sequence[AttentionLayer], dtype: str) -> None:
        """Plan for these layers, with queries of this type, at once from now on. Mutates."""
        kinds = (Kind(dtype, layer.heads // layer.kv_heads, layer.kv_heads, layer.window or 0) for layer in layers)
        self._kinds = list(dict.fromkeys(kinds))
        self._v_dim = max((layer.v_dim for layer in layers), default=0)

    def limit(self, tokens: int) -> None:
        """No request becomes longer than this. Mutates."""
        self._longest = tokens

    def compile(self, layers: Sequence[AttentionLayer], dtype: str, page_size: int) -> None:
        """Compile what these layers need, where there is something to compile: not in the interpreter."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.inference_mode():
                self.warm(layers, dtype, page_size)

    def warm(self, layers: Sequence[AttentionLayer], dtype: str, page_size: int) -> None:
        """Run every kernel that these layers may need once, so that none is compiled in a step. Call after ``expect``.

        A decode and a chunk behind contexts so long that both are cut in pieces. All on one page of zeros.
        """
        long = 64 * self._processors
        tables = [[0] * -(-(long + WARM) // page_size)] * 2
        batch = Batch(
            starts=[long, long], counts=[1, WARM], pages=tables, page_size=page_size, device=self._device
        )  # fmt: skip

        def new(heads: int, size: int, kind: str = dtype, *first: int) -> Tensor:
            return torch.zeros(*(first or (1 + WARM,)), heads, size, dtype=getattr(torch, kind), device=self._device)

        self.plan_batch(batch)
        for layer in dict.fromkeys(layers):
            pages = [new(layer.kv_heads, size, layer.kv_dtype or dtype, 1, page_size)
                     for size in (layer.k_dim, layer.v_dim)]  # fmt: skip
            self.write(new(layer.kv_heads, layer.k_dim), new(layer.kv_heads, layer.v_dim), pages[0], pages[1])
            self.attend(
                new(layer.heads, layer.k_dim), pages[0], pages[1], layer.scale, layer.window or 0, layer.soft_cap or 0.0
            )
        self._step = None

    # ---- a step

    def plan_batch(self, batch: Batch) -> None:
        """Lay out page tables, slots and pieces of work, in one copy to the device. Replaces the step before."""
        rows = rows_of(batch)
        work = {kind: self._pieces(kind, rows) for kind in self._kinds}
        pieces = _sections(each for both in work.values() for each in both)
        slots, pages, *rest = self._send([rows.slots().view(np.int32), rows.pages, *pieces])
        self._step = Step(slots.view(torch.int64), pages, batch.page_size, rows=rows)
        for kind, both in work.items():
            self._step.work[kind], rest = _launches(both, rest)

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan_batch``, into the tensors of the graph with so many rows.

        Raises:
            RuntimeError: ``expect`` or ``limit`` was not called.
            ConfigError: pieces of a fixed size would be so many that their parts take too much memory.
        """
        if not self._kinds or not self._longest:
            raise RuntimeError("attention triton: expect() and start() come before plan_graph()")
        rows, count = rows_of(batch), len(batch.counts)
        if any(number != 1 for number in batch.counts):
            raise ValueError("a graph computes one token a row")
        work = [self._pieces(kind, rows)[0][1] for kind in self._kinds]
        bounds = [self._items(kind, count, batch.page_size) for kind in self._kinds]
        records: list[Ints] = []
        for pieces, bound in zip(work, bounds, strict=True):
            records += [padded(pieces.items, bound), padded(pieces.merges, count)]
        array, ends = packed([rows.slots().view(np.int32), *(each.ravel() for each in records)])
        place = self._places.get(count)
        if place is None:
            place = self._places[count] = self._place(count, batch.page_size, bounds, len(array), ends)
        self._staging.send(array, place.indices)
        self._staging.send(rows.pages, place.step.pages)
        self._step = place.step

    def _place(self, count: int, size: int, bounds: list[int], length: int, ends: list[slice]) -> Place:
        self._affordable(count, bounds)
        room = count * -(-self._longest // size)
        if len(self._tables) < room:
            self._tables = torch.zeros(room, dtype=torch.int32, device=self._device)
        indices = torch.zeros(length, dtype=torch.int32, device=self._device)
        slots, *rest = (indices[end] for end in ends)
        step = Step(slots.view(torch.int64), self._tables[:room], size)
        for at, (kind, bound) in enumerate(zip(self._kinds, bounds, strict=True)):
            step.work[kind] = [Launch(False, rest[2 * at].view(-1, ITEM), rest[2 * at + 1].view(-1, MERGE), bound)]
        return Place(indices, step)

    def _affordable(self, count: int, bounds: list[int]) -> None:
        """Raises ``ConfigError`` where the parts of so many items would take too much memory."""
        for kind, bound in zip(self._kinds, bounds, strict=True):
            parts = bound * kind.kv_heads * height(kind.dtype, kind.group, wide=False) * self._v_dim * 4
            if self._split and parts > MOST_PARTS:
                raise ConfigError(
                    f"attention triton: split_tokens {self._split} cuts {count} rows of up to {self._longest} tokens "
                    f"into pieces that need {parts / 2**30:.1f} GiB in a graph: raise split_tokens, or lower "
                    f"max_model_len"
                )

    def _pieces(self, kind: Kind, rows: Rows) -> list[tuple[bool, Pieces]]:
        """Narrow and wide pieces, as far as there are any."""
        narrow = rows.counts * kind.group <= height(kind.dtype, kind.group, wide=False)
        result = []
        for wide, chosen in ((False, narrow), (True, ~narrow)):
            if chosen.any():
                queries = height(kind.dtype, kind.group, wide) // kind.group
                tiles = tiles_of(rows, chosen, queries, kind.window, ALIGN)
                result.append((wide, pieces_of(tiles, ALIGN, self._wanted(kind, wide), self._split)))
        return result

    def _wanted(self, kind: Kind, wide: bool) -> int:
        """Items that keep the device busy: each is launched for every KV head, several narrow ones fit at once."""
        return -(-self._processors * (1 if wide else 4) // kind.kv_heads)

    def _items(self, kind: Kind, rows: int, size: int) -> int:
        """Most items that so many decodes can become."""
        if self._split is None:
            return rows + self._wanted(kind, False)
        keys = min(kind.window + ALIGN, self._longest) if kind.window else self._longest
        return rows * max(1, -(-keys // self._split))

    def _send(self, sections: list[Ints]) -> list[Tensor]:
        array, ends = packed(sections)
        sent = self._staging.send(array)
        return [sent[end] for end in ends]

    def _work(self, kind: Kind) -> list[Launch]:
        step = self._planned
        known = step.work.get(kind)
        if known is None:
            if step.rows is None:
                raise RuntimeError(f"attention triton: no layer of this shape was expected: {kind}")
            both = self._pieces(kind, step.rows)
            known, _ = _launches(both, self._send(list(_sections(both))))
            step.work[kind] = known
        return known

    @property
    def _planned(self) -> Step:
        if self._step is None:
            raise RuntimeError("attention triton: plan_batch() comes first")
        return self._step

    # ---- a layer

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where the plan says. Mutates the pages."""
        step = self._planned
        keys, values = _lines(keys), _lines(values)
        tokens, kv_heads, dim = keys.shape
        (k_pages, v_pages), fp8 = _bits(k_pages, v_pages, keys.dtype)
        sizes = write_sizes(kv_heads, dim, values.shape[2], fp8)
        kernels.write[(-(-tokens * kv_heads // sizes["BLOCK_R"]),)](
            *(keys, values, k_pages, v_pages, step.slots, tokens, *keys.stride()[:2], *values.stride()[:2]),
            **sizes,
            **FUSED,
        )

    def attend(
        self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, window: int, soft_cap: float
    ) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``.

        Args:
            window: 0: none.
            soft_cap: 0: none.
        """
        step, query = self._planned, _lines(query)
        tokens, heads, dim = query.shape
        kv_heads, v_dim = k_pages.shape[2], v_pages.shape[3]
        kind = Kind(DTYPES[query.dtype], heads // kv_heads, kv_heads, window)
        (k_pages, v_pages), fp8 = _bits(k_pages, v_pages, query.dtype)
        out = query.new_empty(tokens, heads, v_dim)
        scores = (scale / soft_cap, soft_cap * LOG2E) if soft_cap else (scale * LOG2E, 0.0)
        for launch in self._work(kind):
            variant = Variant(
                kind.dtype, kind.group, kv_heads, dim, v_dim, step.page_size, launch.wide, bool(window), bool(soft_cap),
                fp8,
            )  # fmt: skip
            sizes, options = attend_sizes(variant, kernels.INTERPRETED)
            part = torch.empty(launch.parts, kv_heads, sizes["BLOCK_M"], v_dim, device=query.device)
            weight = torch.empty(launch.parts, kv_heads, sizes["BLOCK_M"], device=query.device)
            kernels.attend[(len(launch.items) * kv_heads,)](
                *(query, k_pages, v_pages, out, part, weight, step.pages, launch.items, *scores, window),
                *query.stride()[:2],
                **sizes,
                **options,
                **FUSED,
            )
            if len(launch.merges):
                kernels.merge[(len(launch.merges) * kv_heads,)](
                    out, part, weight, launch.merges, **merge_sizes(variant), **FUSED
                )
        return out


def _sections(both: Iterable[tuple[bool, Pieces]]) -> Iterable[Ints]:
    for _, pieces in both:
        yield from (pieces.items.ravel(), pieces.merges.ravel())


def _launches(both: list[tuple[bool, Pieces]], sent: list[Tensor]) -> tuple[list[Launch], list[Tensor]]:
    """With the next tensors of those that were sent; the others remain."""
    made = []
    for wide, pieces in both:
        items, merges, *sent = sent
        made.append(Launch(wide, items.view(-1, ITEM), merges.view(-1, MERGE), pieces.parts))
    return made, sent


def _lines(tensor: Tensor) -> Tensor:
    """The tensor, the numbers of a head side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _bits(k_pages: Tensor, v_pages: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], bool]:
    """Pages as the kernels take them, and whether they are of fp8. Raises ``ValueError`` for other types."""
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("attention triton reads pages that lie one after the other")
    if k_pages.dtype is dtype and v_pages.dtype is dtype:
        return (k_pages, v_pages), False
    if k_pages.dtype is FLOAT8 and v_pages.dtype is FLOAT8:
        return (k_pages.view(torch.uint8), v_pages.view(torch.uint8)), True
    raise ValueError(f"attention triton reads pages of {dtype} or {FLOAT8}, not {k_pages.dtype} and {v_pages.dtype}")


def processors(device: torch.device) -> int:
    """Multiprocessors; of the CPU, which has none, as many as make the interpreter cut small contexts."""
    made: Any = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return int(made)
