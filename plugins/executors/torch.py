"""The model runner: any standard decoder of transformers, over paged KV, on the CPU or a CUDA device.

This module is cheap to import, so that plugins can be listed and options read without torch; ``load`` brings the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from engine.core.errors import ConfigError, ExecutionError
from engine.core.memory import KVLayout
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Attention, Context, Executor, ModelInfo, PluginOptions
from engine.core.sampling import SAMPLING

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.executors._runner import Runner


CPU_BATCH_TOKENS = 512  # of a step: matrix products of more rows are no faster


class TorchOptions(PluginOptions):
    """Options of the torch executor."""

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N (auto: cuda where torch has it)",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="type of weights, of what is computed, and of KV; say bfloat16 on most GPUs"
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="type of KV pages: auto is dtype, fp8 half or a quarter of it, for backends that read it"
    )
    memory_part: float | None = Field(
        None, gt=0, lt=1, description="CUDA: part of the device's memory to fill, KV last (default: kv_memory says)"
    )
    ahead: bool | None = Field(
        None, description="launch a step before the host knows the tokens of the one in flight (default: on CUDA)"
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="replay decode steps as CUDA graphs (auto: on CUDA, if the backend can; on: or refuse)"
    )
    graph_sizes: tuple[int, ...] = Field(
        (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256), min_length=1,
        description="rows of each graph; those that max_running never fills are left out",
    )  # fmt: skip
    threads: int | None = Field(None, ge=1, description="CPU threads (default: torch's own choice)")
    compiled: bool = Field(True, description="CPU: compute with kernels that are compiled on first use (float32)")
    weights: Literal["float32", "bfloat16", "int8"] = Field(
        "float32", description="how the compiled kernels store matrices: less to read, less exact"
    )
    packed: bool = Field(True, description="else prepack linear weights for oneDNN (float32 on CPUs that have it)")

    @field_validator("graph_sizes")
    @classmethod
    def _positive(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if min(sizes) < 1:
            raise ValueError("a graph has at least one row")
        return sizes


class TorchExecutor(Executor):
    """Runs plans with transformers' modelling code and an attention plugin on paged KV.

    Life: ``use`` → ``load`` → ``allocate`` → ``start`` → ``execute`` … → ``close``. Not thread-safe.
    """

    name = "torch"
    provides = frozenset({"model-runner"})
    uses_attention = True
    overlaps = True
    sampling = SAMPLING
    Options = TorchOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._model: str | None = None
        self._attention: Attention | None = None
        self._seed = 0
        self._runner: Runner | None = None

    def use(self, *, model: str, attention: Attention | None, seed: int = 0) -> None:
        """Say what to serve: the model (see ``resolve``), the attention backend, the seed of unseeded requests.

        Called once, before ``load``. Mutates.
        """
        self._model, self._attention, self._seed = model, attention, seed

    def load(self) -> ModelInfo:
        """Read the model and prepack its weights. Raises ``ModelError``; ``ConfigError`` without ``use``."""
        if self._model is None or self._attention is None:
            raise ConfigError("executor torch needs a model and an attention backend before load(): call use()")
        from engine.plugins.executors._runner import Runner

        self._runner = Runner(self.options, self._model, self._attention, self._seed)
        return self._runner.load()

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate K and V of every layer, zeroed, ``[num_pages, page_size, kv_heads, head_dim]``. Mutates."""
        self._loaded.allocate(num_pages, page_size)

    def default_batch_tokens(self) -> int | None:
        """Few on a CPU: a step of 512 takes a second there, and whoever is being written to waits for it."""
        return CPU_BATCH_TOKENS if self._loaded.on_cpu else None

    def kv_layout(self) -> KVLayout | None:
        """K and then V of every layer in turn; ``None`` where they do not lie in this process's memory."""
        return self._loaded.kv_layout()

    def start(self, context: Context) -> None:
        """Start the attention backend, which is this executor's; capture graphs. Called once, after ``allocate``."""
        if self._attention is not None:
            self._attention.start(context)
        if self._runner is not None:
            self._runner.start(context)

    def default_pages(self, page_size: int) -> int | None:
        """So many as ``memory_part`` leaves room for; ``None`` without it. Raises ``ConfigError``: for none."""
        return self._loaded.default_pages(page_size)

    def execute(self, plan: Plan) -> Outcome:
        """Compute a plan. Rows whose logits hold NaN go into ``errors``; the others stand. Mutates KV memory only.

        Raises:
            ExecutionError: nothing is allocated, or a row's tokens are not all known.
        """
        return self._loaded.execute(plan)

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """As ``execute``; where steps are launched ahead, the answer is what waits for the device.

        A batch waits before ``launch`` returns where somebody in it uses ``top_p`` without a small ``top_k``,
        ``min_tokens``, biases, penalties or a grammar, or wants log-probabilities.
        """
        return self._loaded.launch(plan)

    def broken(self) -> str | None:
        """A device that was lost, in words. Waits for it."""
        return None if self._runner is None else self._runner.broken()

    def weights(self) -> dict[str, Tensor]:
        """A copy of every weight in force, by transformers' name; a tied output embedding has no name of its own."""
        return self._loaded.weights()

    def update_weights(self, weights: Any, version: str | None = None) -> str:
        """Replace weights between two steps: tensors by name (all or some), or a model to read them from.

        Raises:
            ModelError: an unknown name, another shape, no model of this kind; nothing was changed.
        """
        return self._loaded.update_weights(weights, version)

    def close(self) -> None:
        """Free weights and KV memory, and close the attention backend. Idempotent."""
        if self._attention is not None:
            self._attention.close()
        if self._runner is not None:
            self._runner.close()
        self._attention = self._runner = None

    @property
    def kv(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer index -> its K and V memory itself, for connectors and tests. Empty before ``allocate``."""
        return {} if self._runner is None else self._runner.kv

    @property
    def _loaded(self) -> Runner:
        if self._runner is None:
            raise ExecutionError("executor torch: load() and allocate() come before anything is computed")
        return self._runner
