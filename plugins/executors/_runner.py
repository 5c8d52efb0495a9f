"""What the torch executor is made of: a model of transformers, an attention backend, KV memory, a sampler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING

from engine.plugins.executors import _openmp  # noqa: F401  (imports torch, with its setting)

# isort: split
import torch as t
from torch import Tensor

from engine.core.batch import Batch
from engine.core.continuation import Continuations
from engine.core.errors import ConfigError, ExecutionError, ModelError
from engine.core.memory import KVLayout, layout_digest
from engine.core.models.source import resolve
from engine.core.native import NoKernels, kernels
from engine.core.native.kernels import Format
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Attention, Context, ModelInfo
from engine.plugins.executors._device import check_room, lost, pages_that_fit, working_on
from engine.plugins.executors._graphs import DecodeGraphs
from engine.plugins.executors._launch import Launcher, flattened
from engine.plugins.executors._model import LoadedModel, kv_bytes, load_model
from engine.plugins.executors._native import argmax_of
from engine.plugins.executors._packed import can_pack
from engine.plugins.executors._paged import PagedLayers, active, introduce
from engine.plugins.executors._placement import Placement, name_of, placement, with_graphs
from engine.plugins.executors._pooling import Sums, wanted_states
from engine.plugins.executors._replay import CudaCapture, EagerCapture, Waits
from engine.plugins.executors._sampling import Sampler
from engine.plugins.executors._threads import threads
from engine.plugins.executors._weights import Weights, chained, digest

if TYPE_CHECKING:
    from engine.plugins.executors.torch import TorchOptions

log = logging.getLogger(__name__)


class Runner:
    """Runs plans with transformers' modelling code and an attention plugin on paged KV.

    Life: ``load`` → ``allocate`` → ``start`` → ``execute`` or ``launch`` … → ``close``. Not thread-safe: one step at a
    time. On the CPU tokens of the step before are resolved on the host; elsewhere, or where it is asked for, steps are
    launched, and ``execute`` launches and waits.
    """

    def __init__(self, options: TorchOptions, model: str, attention: Attention, seed: int) -> None:
        self.options = options
        self._model_name = model
        self._attention = attention
        self._sampler = Sampler(seed)
        self._model: LoadedModel | None = None
        self._layers: PagedLayers | None = None
        self._num_pages = self._page_size = 0
        self._fingerprint = ""
        self._kernels = "torch"
        self._continuations = Continuations()
        self._place: Placement | None = None
        self._launcher: Launcher | None = None

    def load(self) -> ModelInfo:
        """Read the model and prepack its weights. Raises ``ModelError``, and ``ConfigError`` for what is not there."""
        started = time.perf_counter()
        place = self._place = placement(self.options)
        source = resolve(self._model_name)
        attention = self._attention.prepare(device=str(place.device), dtype=self.options.dtype)
        with threads(self.options.threads):
            model, computing = load_model(source, place.dtype, place.device), t.get_num_threads()
            kv_dtype = name_of(place.kv_dtype) if place.kv_dtype is not place.dtype else ""
            attention = introduce(self._attention, model.layers, attention, kv_dtype)
            packed = self._pack(model)
        self._model = model
        place = self._place = with_graphs(place, self.options, self._attention)
        self._fingerprint = place.marked(model.fingerprint)
        return ModelInfo(
            name=source.served_name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_ids=model.eos_ids,
            fingerprint=self._fingerprint,
            kv_bytes_per_token=kv_bytes(model.layers, place.kv_dtype),
            hidden_size=model.hidden_size,
            details={
                "architecture": type(model.module).__name__,
                "parameters": model.parameters,
                "layers": len(model.layers),
                "device": str(place.device),
                "dtype": self.options.dtype,
                "kv_dtype": name_of(place.kv_dtype),
                "attention": attention,
                "graphs": "of decode steps" if place.graphs else f"none: {place.no_graphs}",
                "packed_linears": packed,
                "kernels": self._kernels,
                "weights": self.options.dtype if self.options.weights == "float32" else self.options.weights,
                "threads": computing,
                "load_seconds": round(time.perf_counter() - started, 3),
            },
        )

    def _pack(self, model: LoadedModel) -> int:
        """Bring the linear layers into the layout of whoever computes them; returns how many were. Mutates."""
        options, on_cpu = self.options, self._placed.on_cpu
        if on_cpu and options.compiled and self._dtype is t.float32:
            try:
                compiled = kernels()
                packed = model.compile(compiled, Format[options.weights])
            except NoKernels as error:
                log.warning("executor torch goes on without compiled kernels: %s", error)
            else:
                self._sampler.argmax = argmax_of(compiled)
                self._kernels = "compiled" if model.fused else f"compiled, in parts: {model.not_fused}"
                return packed
        if options.weights != "float32":
            raise ConfigError(f"executor torch: weights in {options.weights} need the compiled kernels")
        if on_cpu and options.packed and can_pack(self._dtype):
            self._kernels = "onednn"
            return model.pack()
        return 0

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate K and V of every layer, zeroed, ``[num_pages, page_size, kv_heads, head_dim]``. Mutates.

        With graphs there is one page more, for padding rows: nobody else is given it.

        Raises ``ConfigError`` where the machine, or the device, has not so much memory.
        """
        if self._model is None:
            raise ExecutionError("executor torch: load() comes before allocate()")
        place = self._placed
        check_room(place.device, num_pages, self._page_bytes(page_size))
        if self._layers is not None:
            self._layers.close()
        self._layers = PagedLayers(
            *(self._attention, self._model.layers, num_pages + place.graphs, page_size, place.kv_dtype, place.device)
        )
        self._num_pages, self._page_size = num_pages, page_size
        self._launcher = None
        if place.launches:
            self._launcher = Launcher(
                device=place.device,
                attention=self._attention,
                forward=self._model.run,
                forward_with_states=self._model.run_with_states,
                layers=self._layers,
                sampler=self._sampler,
                page_size=page_size,
                cpu_threads=self.options.threads,
            )

    def start(self, context: Context) -> None:
        """Capture the graphs, if there are to be any. The attention backend is started. Mutates."""
        launcher, layers = self._launcher, self._layers
        if launcher is None or layers is None or not self._placed.graphs:
            return
        device = self._placed.device
        most = context.limits.max_running
        sizes = sorted(self.options.graph_sizes)
        fitting = [size for size in sizes if size < most] + [size for size in sizes if size >= most][:1]
        started = time.perf_counter()
        try:
            with working_on(device), t.inference_mode(), active(layers):
                launcher.graphs = DecodeGraphs(
                    sizes=fitting,
                    device=device,
                    scratch=self._num_pages,
                    page_size=self._page_size,
                    plan=self._attention.plan_graph,
                    forward=self._loaded.run,
                    capture=CudaCapture(device) if device.type == "cuda" else EagerCapture(),
                )
        except Waits as error:
            if self.options.graphs == "on":
                raise ConfigError(f"executor torch: there can be no graphs of this model: {error}") from error
            log.warning("executor torch goes on without graphs: of this model there can be none: %s", error)
            return
        log.info("executor torch: graphs of %s rows in %.1f s", fitting, time.perf_counter() - started)

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU is the device. After ``load``."""
        return self._placed.on_cpu

    def default_pages(self, page_size: int) -> int | None:
        """So many as ``memory_part`` leaves room for; ``None`` without it. Raises ``ConfigError``: for none."""
        part = self.options.memory_part
        if part is None:
            return None
        return pages_that_fit(self._placed.device, part, self._page_bytes(page_size))

    def _page_bytes(self, page_size: int) -> int:
        return kv_bytes(self._loaded.layers, self._placed.kv_dtype) * page_size

    def execute(self, plan: Plan) -> Outcome:
        """Compute a plan. Rows whose logits hold NaN go into ``errors``; the others stand. Mutates KV memory only.

        Raises:
            ExecutionError: nothing is allocated, or a row's tokens are not all known.
        """
        if self._model is None or self._layers is None:
            raise ExecutionError("executor torch: load() and allocate() come before execute()")
        if not plan:
            return Outcome(plan, ())
        if self._launcher is not None:
            return self._launcher.launch(plan)()
        rows = self._continuations.rows(plan)
        ids, positions = (t.tensor(numbers, dtype=t.long) for numbers in flattened(plan, rows))
        wanted, states = self._sampler.wanted(plan, rows), wanted_states(plan)
        batch = Batch(
            starts=[row.start for row in rows], counts=plan.counts, pages=plan.tables, page_size=self._page_size
        )
        with threads(self.options.threads), t.inference_mode(), active(self._layers):
            self._attention.plan_batch(batch)
            keep = t.tensor(wanted.keep, dtype=t.long)
            if not states.spans:
                outcome = self._sampler.choose(self._model.run(ids, positions, keep), plan, rows, wanted)
            else:
                places = t.tensor(states.places, dtype=t.long)
                logits, found = self._model.run_with_states(ids, positions, keep, places)
                outcome = Sums(states.spans, found).join(self._sampler.choose(logits, plan, rows, wanted))
        return self._continuations.keep(outcome)

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """As ``execute``; where steps are launched ahead, what is returned waits for the device."""
        if self._launcher is not None and plan and self._placed.ahead:
            return self._launcher.launch(plan)
        outcome = self.execute(plan)
        return lambda: outcome

    def broken(self) -> str | None:
        """A device that was lost, in words."""
        return None if self._place is None else lost(self._place.device)

    def weights(self) -> dict[str, Tensor]:
        """A copy of every weight, by transformers' name, in the executor's dtype."""
        return Weights(self._loaded.module, self._dtype).read()

    def update_weights(self, new: Mapping[str, Tensor] | str | PathLike[str], version: str | None) -> str:
        """Replace weights; returns the new fingerprint. Raises ``ModelError``: nothing was changed. Mutates.

        The fingerprint of all weights together depends on them alone; that of some, also on what was there before.
        """
        model = self._loaded
        places = Weights(model.module, self._dtype)
        if isinstance(new, str | PathLike):
            new = Weights(load_model(resolve(str(new)), self._dtype).module, self._dtype).read()
        weights = places.checked(new)
        if version is not None:
            mark = f"{model.fingerprint}@{version}"
        else:
            mark = digest(weights) if len(weights) == len(places.names) else chained(self._fingerprint, weights)
        places.write(weights)
        model.refresh()
        self._fingerprint = self._placed.marked(mark)
        return self._fingerprint

    def close(self) -> None:
        """Free weights and KV memory. Idempotent."""
        self._model = self._launcher = None
        if self._layers is not None:
            self._layers.close()
        self._layers = None

    @property
    def kv(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer index -> its K and V memory itself, for connectors and tests. Empty before ``allocate``."""
        return {} if self._layers is None else self._layers.pages

    def kv_layout(self) -> KVLayout | None:
        """K and then V of every layer in turn; ``None`` where they do not lie in this process's memory."""
        tensors = [side for _, pair in sorted(self.kv.items()) for side in pair]
        if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
            return None
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        digest = layout_digest(executor="torch", dtype=tensors[0].dtype, order="K, V a layer", shapes=shapes)
        regions = tuple(tensor[: self._num_pages].view(t.uint8).flatten(1).numpy() for tensor in tensors)
        return KVLayout(regions, digest, None if self._layers is None else self._layers.shared)

    @property
    def _loaded(self) -> LoadedModel:
        if self._model is None:
            raise ModelError("executor torch: load() comes before its weights")
        return self._model

    @property
    def _placed(self) -> Placement:
        if self._place is None:
            raise ExecutionError("executor torch: load() comes before anything is placed")
        return self._place

    @property
    def _dtype(self) -> t.dtype:
        dtype: t.dtype = getattr(t, self.options.dtype)
        return dtype
