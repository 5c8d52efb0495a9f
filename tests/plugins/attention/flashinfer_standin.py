"""A stand-in for FlashInfer on the CPU: its wrappers cannot be built without a GPU.

Every call is bound to the recorded signature, and what is left out takes the library's default. What a wrapper
answers is computed in plain torch from what was planned and from nothing else, by the library's rules: whoever forgets
the causal mask gets none, whoever plans float16 cannot ask in bfloat16. So it is known how we call the library; it is
not known what its kernels do on a GPU.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from flashinfer_record import RECORD, signature
from graph_standin import launched, not_captured
from torch import Tensor

SIGNATURES = {name: signature(parameters) for name, parameters in json.loads(RECORD.read_text())["calls"].items()}
DIMS = (64, 128, 256, 512)
GROUPS = (1, 2, 3, 4, 6, 8, 16)  # of decodes without tensor cores
WORKSPACE = 1 << 20
TYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def called(method: Callable[[Any, SimpleNamespace], Any]) -> Callable[..., Any]:
    """A method that gets its arguments as the recorded signature binds them."""

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        return method(self, bind(f"{type(self).__name__}.{method.__name__}", self, *args, **keywords))

    return call


def bind(name: str, *args: Any, **keywords: Any) -> SimpleNamespace:
    """Arguments by name, defaults included. Raises ``TypeError`` for unknown and for missing ones."""
    try:
        bound = SIGNATURES[name].bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


class Planned:
    """What one plan fixes. ``offsets``, ``pages`` and ``last`` are read when it runs, as kernels do."""

    def __init__(self, asked: SimpleNamespace, queries: Tensor, offsets: Tensor, pages: Tensor, last: Tensor) -> None:
        for name, tensor in (("queries", queries), ("offsets", offsets), ("pages", pages), ("last", last)):
            if tensor.dtype is not torch.int32 or tensor.ndim != 1:
                raise TypeError(f"{name} must be a row of int32, not {tensor.dtype} {list(tensor.shape)}")
        self.queries, self.offsets, self.pages, self.last = queries, offsets, pages, last
        self.heads, self.kv_heads, self.size = asked.num_qo_heads, asked.num_kv_heads, asked.page_size
        self.dim = asked.head_dim_qk if hasattr(asked, "head_dim_qk") else asked.head_dim
        self.q_type = dtype_of(asked.q_data_type)
        self.kv_type = self.q_type if asked.kv_data_type is None else dtype_of(asked.kv_data_type)
        self.causal, self.scale = asked.causal, asked.sm_scale
        self.window, self.cap = getattr(asked, "window_left", -1), asked.logits_soft_cap or 0.0
        if self.dim not in DIMS or self.q_type not in TYPES[:2] or self.kv_type not in TYPES:
            raise RuntimeError(f"no kernel for heads of {self.dim} in {self.q_type} over {self.kv_type}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads over {self.kv_heads} KV heads")

    def lengths(self) -> list[int]:
        """Tokens of each row, as FlashInfer counts them."""
        counts = (self.offsets[1:] - self.offsets[:-1] - 1).clamp(min=0)
        return (counts * self.size + self.last).tolist()

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The answer in the queries' type, and the logarithms of the sums of weights, ``[tokens, heads]``."""
        keys, values = self.checked(query, cache)
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype)
        elif out.shape != query.shape or out.dtype is not query.dtype or not out.is_contiguous():
            raise ValueError("out must be like the query, and in one piece")
        sums = torch.empty(query.shape[:2])
        bounds, offsets, pages = self.queries.tolist(), self.offsets.tolist(), self.pages.tolist()
        for row, length in enumerate(self.lengths()):
            part, table = slice(bounds[row], bounds[row + 1]), pages[offsets[row] : offsets[row + 1]]
            k, v = (side[table].flatten(0, 1)[:length].float() for side in (keys, values))
            out[part], sums[part] = self.row(query[part].float(), k, v)
        return out, sums

    def row(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One row's answer ``[queries, heads, dim]`` and sums ``[queries, heads]``."""
        share = self.heads // self.kv_heads
        k, v = (side.repeat_interleave(share, 1) for side in (keys, values))
        scale = 1 / math.sqrt(self.dim) if self.scale is None else self.scale
        scores = torch.einsum("qhd,khd->hqk", query, k) * scale
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        ends = torch.arange(len(query))[:, None] + len(keys) - len(query)
        places = torch.arange(len(keys))[None]
        seen = places <= ends if self.causal else torch.ones(len(query), len(keys), dtype=torch.bool)
        if self.window >= 0:
            seen &= places >= ends - self.window
        scores = scores.masked_fill(~seen, -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T

    def checked(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Refuse what the library refuses, and what its kernels would read past."""
        if not isinstance(cache, tuple) or any(side.ndim != 4 for side in cache):
            raise KeyError("K and V must be a pair of [pages, page_size, kv_heads, head_dim]")
        keys, values = cache
        if query.dtype is not self.q_type:
            raise ValueError(f"The dtype of q {query.dtype} does not match the q_data_type {self.q_type}")
        if keys.dtype is not self.kv_type or values.dtype is not self.kv_type:
            raise ValueError(f"The dtype of k {keys.dtype} does not match the kv_data_type {self.kv_type}")
        if keys.shape != values.shape or keys.stride() != values.stride():
            raise ValueError("k/v strides must be identical")
        if keys.shape[1:] != (self.size, self.kv_heads, self.dim) or query.shape[1:] != (self.heads, self.dim):
            raise ValueError(f"planned otherwise: {list(query.shape)} over {list(keys.shape)}")
        if query.shape[0] != int(self.queries[-1]):
            raise ValueError(f"q.shape[0] ({query.shape[0]}) does not match qo_indptr[-1] ({int(self.queries[-1])}).")
        if query.stride(2) != 1:
            raise ValueError("the query's last dimension must be contiguous")
        return keys, values


class Wrapper:
    """What the wrappers have in common."""

    planned: Planned | None = None

    def _begin(self, workspace: Tensor, layout: str) -> None:
        if workspace.dtype is not torch.uint8 or workspace.numel() < WORKSPACE or bool(workspace[:4096].any()):
            raise ValueError("the workspace must be bytes, enough of them, and zeros at first")
        if layout != "NHD":
            raise KeyError(f"{layout}: K and V lie here as [page_size, kv_heads, head_dim]")

    def _run(self, query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.planned is None:
            raise RuntimeError("plan() comes first")
        return launched(self.planned.run, query, cache, out)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query a row; without a mask, which one query does not need."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        asked = bind("BatchDecodeWithPagedKVCacheWrapper.__init__", self, *args, **keywords)
        self._begin(asked.float_workspace_buffer, asked.kv_layout)
        self.graph, self.cores = asked.use_cuda_graph, asked.use_tensor_cores
        self.buffers = (
            asked.paged_kv_indptr_buffer, asked.paged_kv_indices_buffer, asked.paged_kv_last_page_len_buffer,
        )  # fmt: skip
        if self.graph and len(self.buffers[0]) != len(self.buffers[2]) + 1:
            raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    def plan(self, *args: Any, **keywords: Any) -> None:
        name = "BatchDecodeWithPagedKVCacheWrapper"
        told = bind(f"{name}.plan", self, *args, **keywords)
        if told.deprecated_positional_args:
            warnings.warn("Passing optional arguments positionally is deprecated", DeprecationWarning, stacklevel=2)
        asked = bind(f"{name}._plan_impl", self, *args[:7], **told.kwargs)
        not_captured()
        if not self.cores and asked.num_qo_heads // asked.num_kv_heads not in GROUPS:
            raise RuntimeError(f"Unsupported group_size: {asked.num_qo_heads // asked.num_kv_heads}")
        asked.causal = False
        told_rows = (asked.indptr, asked.indices, asked.last_page_len)
        queries = torch.arange(len(asked.last_page_len) + 1, dtype=torch.int32)
        if self.graph:
            self._keep(told_rows)
            told_rows = self.buffers
        self.planned = Planned(asked, queries, *told_rows)

    def _keep(self, rows: Sequence[Tensor]) -> None:
        if len(rows[2]) != len(self.buffers[2]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(rows[1]) > len(self.buffers[1]):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")
        for buffer, tensor in zip(self.buffers, rows, strict=True):
            buffer[: len(tensor)].copy_(tensor)

    @called
    def run(self, asked: SimpleNamespace) -> Tensor:
        return self._run(asked.q, asked.paged_kv_cache, asked.out)[0]


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Any number of queries a row."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        asked = bind("BatchPrefillWithPagedKVCacheWrapper.__init__", self, *args, **keywords)
        self._begin(asked.float_workspace_buffer, asked.kv_layout)

    @called
    def plan(self, asked: SimpleNamespace) -> None:
        not_captured()
        rows = (asked.qo_indptr, asked.paged_kv_indptr, asked.paged_kv_indices, asked.paged_kv_last_page_len)
        self.planned = Planned(asked, *rows)

    @called
    def run(self, asked: SimpleNamespace) -> Any:
        out, sums = self._run(asked.q, asked.paged_kv_cache, asked.out)
        return (out, sums) if asked.return_lse else out


class BatchAttention(Wrapper):
    """Lengths instead of last pages; no window; the cap counts when it runs, and must have been planned."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        asked = bind("BatchAttention.__init__", self, *args, **keywords)
        self.device, self.planned_cap = torch.device(asked.device), 0.0

    @called
    def plan(self, asked: SimpleNamespace) -> None:
        not_captured()
        if asked.head_dim_qk > 256 or asked.kv_indices.device != self.device:
            raise ValueError("head_dim > 256, or pages that are not on the device")
        self.planned_cap = asked.logits_soft_cap or 0.0
        lengths, offsets = asked.kv_len_arr.tolist(), asked.kv_indptr
        if ((offsets[1:] - offsets[:-1]).tolist()) != [-(-length // asked.page_size) for length in lengths]:
            raise ValueError("kv_len_arr has lengths of rows, not of last pages")
        last = torch.tensor([(length - 1) % asked.page_size + 1 for length in lengths], dtype=torch.int32)
        self.planned = Planned(asked, asked.qo_indptr, offsets, asked.kv_indices, last)

    @called
    def run(self, asked: SimpleNamespace) -> tuple[Tensor, Tensor]:
        if asked.logits_soft_cap > 0 and self.planned_cap <= 0:
            raise ValueError("logits_soft_cap used in kernel run but not provided in plan()")
        out, sums = self._run(asked.q, asked.kv_cache, asked.out)
        if self.planned_cap > 0 and asked.logits_soft_cap != self.planned_cap:
            out.fill_(math.nan)  # capped at 0: 0 times the hyperbolic tangent of infinity or of nothing
        return out, sums


class MultiLevelCascadeAttentionWrapper(Wrapper):
    """A prefill a level; only the last one may be causal; their answers are merged by their sums."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        asked = bind("MultiLevelCascadeAttentionWrapper.__init__", self, *args, **keywords)
        self._begin(asked.float_workspace_buffer, asked.kv_layout)
        self.levels: list[Planned] = []
        self.number = asked.num_levels

    @called
    def plan(self, asked: SimpleNamespace) -> None:
        not_captured()
        arrays = (
            asked.qo_indptr_arr, asked.paged_kv_indptr_arr, asked.paged_kv_indices_arr, asked.paged_kv_last_page_len,
        )  # fmt: skip
        if any(len(array) != self.number for array in arrays):
            raise ValueError(f"{self.number} levels, and not {[len(array) for array in arrays]}")
        causal, self.levels = asked.causal, []
        for level, rows in enumerate(zip(*arrays, strict=True)):
            asked.causal = causal and level == self.number - 1
            self.levels.append(Planned(asked, *rows))

    @called
    def run(self, asked: SimpleNamespace) -> Tensor:
        return launched(self._merged, asked.q, asked.paged_kv_cache, None)[0]

    def _merged(self, query: Tensor, cache: tuple[Tensor, Tensor], out: None) -> tuple[Tensor, Tensor]:
        answers = [level.run(query, cache, None) for level in self.levels]
        sums = torch.stack([sums for _, sums in answers])
        shares = sums.softmax(0)[..., None]
        parts = torch.stack([answer.float() for answer, _ in answers])
        return (parts * shares).sum(0).to(query.dtype), sums.logsumexp(0)


def dtype_of(value: Any) -> torch.dtype:
    """A type, or its name, as signatures have it."""
    return value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."))
