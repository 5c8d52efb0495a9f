"""FlashInfer's own wrappers on the CPU, where it is installed: all of its Python runs; what it compiles is replaced.

What would be launched is computed in torch from the arguments that the kernels get. So everything between our calls and
the launch is the library's: its checks, defaults, copies and the order of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from flashinfer_standin import Planned
from graph_standin import launched
from torch import Tensor

CAUSAL, NHD = 1, 0  # as its kernels number them


def answered(
    rows: Sequence[Tensor], tensors: Sequence[Tensor], out: Tensor, sums: Tensor | None, *, causal: bool,
    layout: int, window: int, cap: float, scale: float,
) -> None:  # fmt: skip
    """What the kernels do: from tensors, into ``out`` and, to the base 2, into ``sums``."""
    assert layout == NHD
    query, keys, values = tensors
    asked = SimpleNamespace(
        num_qo_heads=query.shape[1], num_kv_heads=keys.shape[2], head_dim=query.shape[2], page_size=keys.shape[1],
        q_data_type=query.dtype, kv_data_type=keys.dtype, causal=causal, sm_scale=scale, window_left=window,
        logits_soft_cap=cap,
    )  # fmt: skip
    planned = Planned(asked, *rows)

    def kernel(query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> tuple[Tensor, Tensor]:
        found, weights = planned.run(query, cache, None)
        out.copy_(found)
        if sums is not None:
            sums.copy_(weights / math.log(2))
        return out, weights

    launched(kernel, query, (keys, values), out)


class PrefillModule:
    """Of prefills, and of decodes on tensor cores."""

    def __init__(self, *built_for: Any) -> None:
        types = [each for each in built_for if isinstance(each, torch.dtype)]
        self.query, self.kv, self.out = types[:3]
        self.windowed, self.capped = built_for[-4], built_for[-3]

    def plan(self, *args: Any) -> list[int]:
        """The schedule is made on the host."""
        assert all(not isinstance(each, Tensor) or each.device.type == "cpu" for each in args)
        self.planned_window = args[15]
        return [len(args)]

    def paged_run(self, *args: Any) -> None:
        """One launch."""
        query, keys, values, queries, offsets, pages, last, out, sums, mask, layout, window = args[3:15]
        cap, scale = args[22:24]
        assert (query.dtype, keys.dtype, out.dtype) == (self.query, self.kv, self.out)
        assert (window >= 0, cap > 0, window) == (self.windowed, self.capped, self.planned_window)
        answered((queries, offsets, pages, last), (query, keys, values), out, sums,
                 causal=mask == CAUSAL, layout=layout, window=window, cap=cap, scale=scale)  # fmt: skip


class DecodeModule:
    """Of decodes without tensor cores."""

    def __init__(self, *built_for: Any) -> None:
        self.query, self.kv, self.out = built_for[:3]
        self.windowed, self.capped = built_for[-2:]

    def plan(self, *args: Any) -> list[int]:
        """The schedule is made on the host."""
        assert args[3].device.type == "cpu"
        return [len(args)]

    def run(self, *args: Any) -> None:
        """One launch."""
        query, keys, values, offsets, pages, last, out, sums, layout, window = args[3:13]
        cap, scale = args[15:17]
        assert (query.dtype, keys.dtype, out.dtype) == (self.query, self.kv, self.out)
        assert (window >= 0, cap > 0) == (self.windowed, self.capped)
        queries = torch.arange(len(last) + 1, dtype=torch.int32)
        answered((queries, offsets, pages, last), (query, keys, values), out, sums,
                 causal=False, layout=layout, window=window, cap=cap, scale=scale)  # fmt: skip


class HolisticModule:
    """Of both in one launch: where rows lie is a part of the schedule."""

    def __init__(self, *built_for: Any) -> None:
        self.capped = built_for[-2]

    def plan(self, *args: Any) -> list[Any]:
        """The schedule is made on the host."""
        queries, offsets, lengths = args[3:6]
        return [queries, offsets, lengths, args[-1]]

    def run(self, *args: Any) -> None:
        """One launch."""
        (queries, offsets, lengths, causal), query, keys, values, pages, out, sums, mask, layout = args[2:11]
        scale, cap = args[15:17]
        assert causal == (mask == CAUSAL)
        assert (cap > 0) == self.capped
        last = (lengths - 1) % keys.shape[1] + 1
        answered((queries, offsets, pages, last), (query, keys, values), out, sums,
                 causal=causal, layout=layout, window=-1, cap=cap, scale=scale)  # fmt: skip


def merged(out: Tensor, sums: Tensor, other: Tensor, others: Tensor, mask: Any = None) -> None:
    """``merge_state_in_place``."""
    both = torch.stack([sums, others]) * math.log(2)
    shares = both.softmax(0)[..., None]
    out.copy_(out.float() * shares[0] + other.float() * shares[1])
    sums.copy_(both.logsumexp(0) / math.log(2))


@contextmanager
def on_the_cpu(capability: tuple[int, int] = (8, 0)) -> Iterator[Any]:
    """The library, with its wrappers as they are. What it would compile for that GPU is computed in torch instead."""
    import flashinfer
    from flashinfer import cascade, decode, prefill
    from flashinfer.attention import _core

    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
        return empty(*args, **keywords)

    modules = {
        (decode, "get_batch_decode_module"): DecodeModule,
        (decode, "get_batch_prefill_module"): lambda backend, *args: PrefillModule(*args),
        (prefill, "get_batch_prefill_module"): lambda backend, *args: PrefillModule(*args),
        (_core, "get_holistic_attention_module"): HolisticModule,
        (_core, "get_holistic_attention_independent_module"): HolisticModule,
        (cascade, "merge_state_in_place"): merged,
        (decode, "get_compute_capability"): lambda device: capability,
        (prefill, "get_compute_capability"): lambda device: capability,
        (decode, "determine_attention_backend"): lambda *args, **keywords: "fa2",
        (prefill, "determine_attention_backend"): lambda *args, **keywords: "fa2",
        (torch, "empty"): unpinned,
        (torch.cuda, "synchronize"): lambda: None,
    }
    with ExitStack() as replaced:
        for (where, name), by in modules.items():
            replaced.enter_context(mock.patch.object(where, name, by))
        yield flashinfer
