"""An executor that computes nothing: each step takes the time that a cost model says, on the engine's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.memory import KVLayout, layout_digest
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Context, Executor, ModelInfo, PluginOptions
from engine.core.request import Request
from engine.lab.clock import SimulatedClock
from engine.lab.cost import CostModel, Roofline, load_fitted
from engine.lab.gpus import gpu
from engine.lab.shapes import shape
from engine.lab.work import work_of

WHERE = "engine.lab.executor:ModelledExecutor"
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]


class ModelledExecutor(Executor):
    """A device of modelled speed. A request is answered with one token, again and again: its own.

    In overlap mode the device goes on with the next step as soon as it has one, while the host plans.

    Attributes:
        cost: says how long steps take; may be replaced before the first.
        simulated: the clock on which time passes at once; ``None``: it is the machine's, and is waited for.
        busy: seconds that the device has computed so far.
        work: tokens computed, and rows, so far.
        ends: tokens of the answers that end by themselves, by request id: the last one is ``end_token``.
    """

    name = "modelled"
    overlaps = True
    threaded = False

    class Options(PluginOptions):
        gpu: str = Field("h100", description="device of the table in engine.lab.gpus")
        tensor_parallel: int = Field(1, ge=1, description="devices that share every layer")
        dtype: Dtype = Field("bfloat16", description="numbers of the weights")
        kv_dtype: Dtype = Field("bfloat16", description="numbers of the KV cache")
        compute_share: float = Field(0.7, gt=0, le=1, description="part of the device's peak that products reach")
        bandwidth_share: float = Field(0.8, gt=0, le=1, description="part of the memory's peak that reads reach")
        memory_share: float = Field(0.9, gt=0, le=1, description="part of the memory that weights and KV may use")
        step_ms: float = Field(0.5, ge=0, description="time of a step on the device, whatever it computes")
        host_ms: float = Field(
            1.0, ge=0, description="time between two steps in which the engine plans (not overlapped)"
        )
        cost: str | None = Field(
            None, description="file of a fitted cost, instead of all that; see engine simulate --fit"
        )

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._said: dict[Request, tuple[int, ...]] = {}
        self._free = 0.0  # when the device has computed all that it was given
        self.simulated: SimulatedClock | None = None
        self.busy = 0.0
        self.work = [0, 0]
        self.ends: dict[str, int] = {}
        self._last: dict[Request, int] = {}  # index of the token that ends it

    def use(self, *, model: str, attention: Any, seed: int) -> None:
        """Which model it stands for."""
        self._model = model

    def load(self) -> ModelInfo:
        """Raises ``ModelError`` where the model's sizes are not known, ``ConfigError`` where the device is not."""
        options = self.options
        self.shape = shape(self._model)
        self.cost: CostModel = self._roofline() if options.cost is None else load_fitted(Path(options.cost))
        return ModelInfo(
            name=self.shape.name,
            vocab_size=self.shape.vocab,
            max_model_len=self.shape.max_length,
            fingerprint=f"modelled-{self.shape.name}-{options.kv_dtype}",
            kv_bytes_per_token=self._kv_bytes,
            details={"computes": "nothing: steps take the time that a cost model says", "cost": self.cost.describe()},
        )

    def _roofline(self) -> Roofline:
        options = self.options
        return Roofline(
            model=self.shape, gpu=gpu(options.gpu), degree=options.tensor_parallel, compute_share=options.compute_share,
            bandwidth_share=options.bandwidth_share, weight_bytes=BYTES[options.dtype],
            kv_bytes=BYTES[options.kv_dtype], overhead=options.step_ms / 1e3,
        )  # fmt: skip

    @property
    def _kv_bytes(self) -> int:
        return int(self.shape.kv_numbers * BYTES[self.options.kv_dtype])

    def default_pages(self, page_size: int) -> int | None:
        """What the devices hold beside the weights. With a fitted cost it is not known: as the configuration says.

        Raises ``ConfigError`` where that is nothing.
        """
        options = self.options
        if options.cost is not None:
            return None
        memory = gpu(options.gpu).memory * options.tensor_parallel * options.memory_share
        weights = self.shape.weights * BYTES[options.dtype]
        pages = int((memory - weights) // (self._kv_bytes * page_size))
        if pages < 1:
            raise ConfigError(
                f"model {self.shape.name} has {weights / 1e9:.0f} GB of weights: {options.tensor_parallel} x "
                f"{options.gpu} leave no room for KV"
            )
        return pages

    def default_batch_tokens(self) -> int | None:
        """What the engines of the field take on such devices."""
        return 8192 if self.options.cost is None else None

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""
        self._page_size = page_size

    def kv_layout(self) -> KVLayout:
        """No bytes: only keys are moved."""
        return KVLayout((), layout_digest(executor=self.name, page_size=self._page_size))

    def start(self, context: Context) -> None:
        """Go by the engine's clock."""
        self._clock = context.clock
        self.end_token = context.limits.vocab_size - 1

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """The device begins as soon as it is free; the answer is there when it is done."""
        work = work_of(plan.starts, plan.counts, sum(plan.samples))
        seconds = self.cost.seconds(work)
        self._free = max(self._clock() + self.options.host_ms / 1e3, self._free) + seconds
        self.busy += seconds
        self.work[0] += work.tokens
        self.work[1] += len(plan.counts)
        done, outcome = self._free, Outcome(plan, self._tokens(plan))
        return lambda: self._at(done, outcome)

    def execute(self, plan: Plan) -> Outcome:
        """Launch it, and wait."""
        return self.launch(plan)()

    def _at(self, done: float, outcome: Outcome) -> Outcome:
        simulated = self.simulated
        if simulated is not None:
            simulated.now = max(simulated.now, done)
        elif (left := done - self._clock()) > 0:
            time.sleep(left)
        return outcome

    def _tokens(self, plan: Plan) -> list[tuple[int, ...]]:
        said = self._said
        try:
            tokens = [said[request] for request in plan.requests]
        except KeyError:
            for request in plan.requests:
                if request not in said:
                    said[request] = (crc32(request.id.encode()) % self.end_token,)
                    if (output := self.ends.pop(request.id, None)) is not None:
                        self._last[request] = request.num_prompt + output - 1
            tokens = [said[request] for request in plan.requests]
        if self._last:
            self._end(plan, tokens)
        if all(plan.samples):
            return tokens
        return [token if samples else () for token, samples in zip(tokens, plan.samples, strict=True)]

    def _end(self, plan: Plan, tokens: list[tuple[int, ...]]) -> None:
        """The last tokens of answers that end. In overlap mode a row more may come after one: it is dropped."""
        last = self._last
        for row, request in enumerate(plan.requests):
            if (at := last.get(request)) is not None and plan.starts[row] + plan.counts[row] >= at:
                tokens[row] = (self.end_token,)

    def forget(self, request: Request) -> None:
        """Its tokens."""
        self._said.pop(request, None)
        self._last.pop(request, None)
        self.ends.pop(request.id, None)
