"""The computing part of backend ``flashinfer``: page tables for FlashInfer's wrappers, once a step and kind of layer.

Layers that ask the same (heads, types, scale, window, cap) share a plan; the first of them to ask in a step makes it.
A captured graph has wrappers and memory of its own, planned for all expected layers before each replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.core.batch import AttentionLayer, Batch
from engine.core.config import parse_bytes
from engine.core.errors import ConfigError, one_line
from engine.plugins.attention._flashinfer_tables import Kind, Part, Sharing, Step, Tables
from engine.plugins.attention._flashinfer_wrappers import (
    Cascade,
    Decode,
    Graph,
    Holistic,
    Layer,
    OnDevice,
    Prefill,
    Wrapper,
    uses_tensor_cores,
)

if TYPE_CHECKING:
    from engine.plugins.attention.flashinfer import FlashInferOptions

DIMS = (64, 128, 256)  # sizes of a head that its kernels are written for
MANY = 65  # queries of a row: from so many on, prefills on Hopper have kernels of their own
DTYPES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn

Tokens: TypeAlias = "slice | Tensor"  # of the flattened batch


class Share(NamedTuple):
    """A part of the step whose tables are where FlashInfer wants them."""

    kind: Kind
    tokens: Tokens
    tables: list[OnDevice]


class Captured(NamedTuple):
    """What belongs to the graph of so many rows: where it writes, where it reads, and who plans it."""

    slots: Tensor
    runs: Mapping[Layer, list[tuple[Tokens, Wrapper]]]


class FlashInferKernels:
    """Causal attention by FlashInfer. Mutates K and V pages in ``write`` only.

    Args:
        library: FlashInfer, or what stands in for it.
        options: those of the plugin.
        device: where K, V and queries are.
        most_pages: no row has more; 0: not known yet. Graphs have memory for so many.
    """

    def __init__(self, library: Any, options: FlashInferOptions, device: str, most_pages: int) -> None:
        self._library, self._options, self._device = library, options, torch.device(device)
        self._workspace = torch.zeros(parse_bytes(options.workspace), dtype=torch.uint8, device=device)
        self._sharing = None if options.cascade is None else Sharing(options.cascade, options.cascade_rows)
        self._wrappers: dict[tuple[Kind, Layer], Wrapper] = {}
        self._expected: tuple[Layer, ...] = ()
        self.most_pages = most_pages
        self._graphs: dict[int, Captured] = {}
        self._graph_pages = torch.empty(0, dtype=torch.int32, device=device)
        self._copied: torch.cuda.Event | None = None
        self._step: Step | None = None
        self._slots = torch.empty(0, dtype=torch.long, device=device)
        self._shares: dict[bool, list[Share]] = {}
        self._runs: dict[Layer, list[tuple[Tokens, Wrapper]]] = {}

    def expect(self, layers: Sequence[AttentionLayer], dtype: str) -> None:
        """These layers will ask: every kernel that they need runs once, so that none is compiled in a step.

        Raises:
            ConfigError: one of them cannot be answered, or a kernel cannot be compiled or run.
        """
        for told in layers:
            if words := refusal(_expected(told, dtype), told.v_dim):
                raise ConfigError(f"attention flashinfer {words}")
        self._expected = tuple(dict.fromkeys(_expected(told, dtype) for told in layers))
        try:
            for layer in self._expected:
                self._try(layer)
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(f"attention flashinfer: kernels cannot be compiled or run: {one_line(error)}") from error

    def _try(self, layer: Layer) -> None:
        """Two rows on a page that both have, and one of their own, by every wrapper that may be asked.

        And a row of many queries: on Hopper prefills of more than 64 a row have kernels of their own.
        """
        step = Step(Batch(starts=[1, 1], counts=[1, 1], pages=[[0, 1], [0, 2]], page_size=1))
        (plain,), (shared,) = step.parts("split", None), step.parts("split", Sharing(1, 2))
        kinds: dict[Kind, Part] = {"decode": plain, "prefill": plain}
        if layer.window is None:
            kinds |= {"batch": plain} if self._options.mixed == "batch" else {}
            kinds |= {"cascade": shared} if self._sharing is not None else {}
        (many,) = Step(Batch(starts=[0], counts=[MANY], pages=[[0] * MANY], page_size=1)).parts("split", None)
        query = torch.zeros(MANY, layer.heads, layer.dim, dtype=layer.dtype, device=self._device)
        pages = torch.zeros(3, 1, layer.kv_heads, layer.dim, dtype=layer.kv_dtype, device=self._device)
        for kind, part in [*kinds.items(), ("prefill", many)]:
            self._wait()
            wrapper = self._wrapper(kind, layer)
            wrapper.plan([self._tables(tables) for tables in part.tables], step.size)
            wrapper.run(query[: int(part.tables[-1].queries[-1])], (pages, pages), None)
            self._mark()

    def plan_batch(self, batch: Batch) -> None:
        """Lay out rows. Each kind of layer is planned when the first of them asks."""
        self._wait()
        self._step, self._shares, self._runs = Step(batch), {}, {}
        self._slots = self._put(self._step.slots())

    def plan_graph(self, batch: Batch) -> None:
        """Plan decodes for the graph of so many rows. Mutates what belongs to it, in the order of the stream."""
        self._wait()
        step, rows = Step(batch), len(batch.counts)
        graph = self._graphs.get(rows)
        if graph is None:
            graph = self._graphs[rows] = self._captured(rows)
        laid = step.tables(range(rows))
        if (longest := int((laid.offsets[1:] - laid.offsets[:-1]).max())) > self.most_pages:
            raise ValueError(f"attention flashinfer: a row has {longest} pages, more than {self.most_pages}")
        graph.slots.copy_(self._host(step.slots()), non_blocking=True)
        tables = [self._tables(laid)]
        for ((_, wrapper),) in graph.runs.values():
            wrapper.plan(tables, step.size)
        self._mark()
        self._step, self._slots, self._runs = None, graph.slots, dict(graph.runs)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]``, rounded to the pages' type. Mutates the pages."""
        for pages, new in ((k_pages, keys), (v_pages, values)):
            flat = pages.flatten(0, 1)
            if pages.dtype is FP8:  # torch rounds what is too large to NaN, and does not index fp8 everywhere
                most = torch.finfo(FP8).max
                flat, new = flat.view(torch.uint8), new.clamp(-most, most).to(FP8).view(torch.uint8)
            flat.index_copy_(0, self._slots, new)

    def attend(
        self,
        query: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        scale: float,
        *,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new."""
        _, heads, dim = query.shape
        layer = Layer(heads, k_pages.shape[2], dim, query.dtype, k_pages.dtype, scale, window, soft_cap)
        runs = self._runs.get(layer)
        if runs is None:
            runs = self._runs[layer] = self._planned(layer, v_pages.shape[3])
        query = query if query.stride(2) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tokens, wrapper in runs:
            if isinstance(tokens, slice):
                wrapper.run(query[tokens], (k_pages, v_pages), out[tokens])
            else:
                out.index_copy_(0, tokens, wrapper.run(query.index_select(0, tokens), (k_pages, v_pages), None))
        return out

    def _planned(self, layer: Layer, v_dim: int) -> list[tuple[Tokens, Wrapper]]:
        """Plan the step for layers of this kind."""
        if self._step is None:
            raise RuntimeError(
                f"attention flashinfer: no layer like {layer} was expected, so no graph was planned for it"
            )
        if words := refusal(layer, v_dim):
            raise ValueError(f"attention flashinfer {words}")
        runs: list[tuple[Tokens, Wrapper]] = []
        for kind, tokens, tables in self._shared(self._step, layer.window is not None):
            wrapper = self._wrapper(kind, layer)
            wrapper.plan(tables, self._step.size)
            runs.append((tokens, wrapper))
        self._mark()
        return runs

    def _shared(self, step: Step, windowed: bool) -> list[Share]:
        """The step's parts, for layers with a window or for those without."""
        found = self._shares.get(windowed)
        if found is None:
            mixed = self._options.mixed
            parts = step.parts(
                "prefill" if windowed and mixed == "batch" else mixed, None if windowed else self._sharing
            )
            found = self._shares[windowed] = [self._share(part) for part in parts]
        return found

    def _share(self, part: Part) -> Share:
        tokens = part.tokens if isinstance(part.tokens, slice) else self._put(part.tokens)
        return Share(part.kind, tokens, [self._tables(tables) for tables in part.tables])

    def _wrapper(self, kind: Kind, layer: Layer) -> Wrapper:
        found = self._wrappers.get((kind, layer))
        if found is None:
            found = self._wrappers[kind, layer] = self._made(kind, layer)
        return found

    def _made(self, kind: Kind, layer: Layer) -> Wrapper:
        if kind == "batch":
            return Holistic(self._library, self._device, layer)
        if kind == "decode":
            cores = uses_tensor_cores(layer, self._options.tensor_cores)
            return Decode(self._library, self._workspace, layer, cores)
        return (Prefill if kind == "prefill" else Cascade)(self._library, self._workspace, layer)

    def _captured(self, rows: int) -> Captured:
        """Memory and wrappers for a graph of so many rows; all graphs share the memory for pages."""
        if not self._expected or not self.most_pages:
            raise RuntimeError("attention flashinfer: expect() and start() come before plan_graph()")
        kind = {"dtype": torch.int32, "device": self._device}
        most = rows * self.most_pages
        if len(self._graph_pages) < most:  # graphs that were captured keep the smaller one
            self._graph_pages = torch.zeros(most, **kind)
        graph = Graph(torch.zeros(rows + 1, **kind), self._graph_pages[:most], torch.zeros(rows, **kind))
        runs: dict[Layer, list[tuple[Tokens, Wrapper]]] = {}
        for layer in self._expected:
            cores = uses_tensor_cores(layer, self._options.tensor_cores)
            runs[layer] = [(slice(0, rows), Decode(self._library, self._workspace, layer, cores, graph))]
        return Captured(torch.zeros(rows, dtype=torch.long, device=self._device), runs)

    # ---- from the host to the device

    def _tables(self, tables: Tables) -> OnDevice:
        host = [self._host(array) for array in tables]
        return OnDevice(*host)._replace(pages=host[2].to(self._device, non_blocking=True))

    def _put(self, array: Any) -> Tensor:
        return self._host(array).to(self._device, non_blocking=True)

    def _host(self, array: Any) -> Tensor:
        """As a tensor that a device can copy while we go on: torch keeps it until it has."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor

    def _wait(self) -> None:
        """FlashInfer plans in memory that the device copies later: not again before it has."""
        if self._copied is not None:
            self._copied.synchronize()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))


def refusal(layer: Layer, v_dim: int) -> str | None:
    """Why a layer cannot be computed; ``None``: it can."""
    if layer.dtype not in DTYPES:
        return f"computes float16 and bfloat16, not {layer.dtype}".replace("torch.", "")
    if layer.kv_dtype not in (layer.dtype, FP8):
        return f"reads pages of {layer.dtype} or {FP8}, not of {layer.kv_dtype}".replace("torch.", "")
    if layer.dim not in DIMS:
        return f"has kernels for heads of 64, 128 and 256 numbers, not of {layer.dim}"
    if layer.dim != v_dim:
        return f"wants K and V of one size, not of {layer.dim} and {v_dim}"
    return None


def _expected(layer: AttentionLayer, dtype: str) -> Layer:
    types = getattr(torch, dtype), getattr(torch, layer.kv_dtype or dtype)
    return Layer(layer.heads, layer.kv_heads, layer.k_dim, *types, layer.scale, layer.window, layer.soft_cap)
