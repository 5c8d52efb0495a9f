"""Executors: they compute plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from engine.core.errors import ConfigError
from engine.core.plan import Outcome, Plan
from engine.core.protocols.attention import Attention
from engine.core.protocols.plugin import ModelInfo, Plugin
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.memory import KVLayout


class Executor(Plugin, ABC):
    """Runs plans on a model. Plans are executed in order; row i's page table is ``plan.tables[i]``.

    Class attributes:
        uses_attention: an attention backend must be selected for it.
        overlaps: ``launch`` may be called in a thread of its own, with plans that were made before the outcome of the
            one before was known (``Plan.awaits``). Without it the engine plans and executes in turns.
        threaded: where it overlaps, ``launch`` is called in that thread. False for one whose ``launch`` takes no time.
        sampling: which of ``engine.core.sampling.SAMPLING`` it acts on. Requests that use another are refused by name.
        pooling: which of ``engine.core.pooling.POOLING`` it computes (``Outcome.pooled``), of models for which it says
            a ``ModelInfo.hidden_size``. Requests for another vector are refused.
    """

    uses_attention: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    threaded: ClassVar[bool] = True
    sampling: ClassVar[tuple[str, ...]] = ()
    pooling: ClassVar[tuple[str, ...]] = ()

    def use(self, *, model: str, attention: Attention | None, seed: int) -> None:
        """What the configuration chose: told once, before ``load``. Default: ignored."""

    @abstractmethod
    def load(self) -> ModelInfo:
        """Read the model. Called once, first. May take seconds and show progress. Raises ``ModelError``."""

    @abstractmethod
    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate KV memory for so many pages. Called once, after ``load``."""

    @abstractmethod
    def execute(self, plan: Plan) -> Outcome:
        """Compute the plan: write KV for every row's tokens, sample where ``plan.samples``. Does not touch requests.

        Raises ``ExecutionError`` (or anything else) when the step as a whole failed; a row that failed alone goes into
        ``outcome.errors``.
        """

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """Begin to compute the plan; what is returned waits until it is computed, and gives its outcome or raises.

        This is what the engine calls, plan after plan. An executor of a device that works on its own returns as soon as
        the device has been told all, so that the next plan can be launched meanwhile. The answer is asked for once, in
        any thread, also while the next plan is being launched. Default: ``execute``, at once.
        """
        outcome = self.execute(plan)
        return lambda: outcome

    def broken(self) -> str | None:
        """Asked after a step failed: ``None`` if later steps may work, else the cause; the engine then stops.

        An executor whose device is lost must say so: as long as it does not, only the failed step's requests end.
        """
        return None

    def weights(self) -> Mapping[str, Any]:
        """A copy of the weights in force, by name: arrays of the executor's own kind. Does not mutate.

        Raises:
            ConfigError: this executor cannot show them (the default).
        """
        raise ConfigError(f"executor {self.name} cannot show its weights")

    def update_weights(self, weights: Any, version: str | None = None) -> str:
        """Replace weights by others of the same shapes; returns the model's new fingerprint. Mutates.

        Called between two steps. All is checked before anything is changed. The new weights are copied: whoever gave
        them may go on changing them.

        Args:
            weights: by name, all or some; or where to read them from, as ``use`` was told.
            version: names the weights, instead of a digest of them all: equal names must mean equal weights.

        Raises:
            ConfigError: this executor cannot change its weights (the default).
            ModelError: they do not fit; nothing was changed.
        """
        raise ConfigError(f"executor {self.name} cannot change its weights")

    def kv_layout(self) -> KVLayout | None:
        """Its KV memory, for connectors; ``None`` where nobody else can reach it. Called after ``allocate``."""
        return None

    def forget(self, request: Request) -> None:
        """The request ended; drop per-request state. Called at most once a request."""

    def default_pages(self, page_size: int) -> int | None:
        """Pages worth allocating when the configuration does not say; ``None`` leaves it to the core's default."""
        return None

    def default_batch_tokens(self) -> int | None:
        """Most tokens of a step when the configuration does not say; ``None`` leaves it to the core's default.

        Streams that run wait for a step as long as its tokens take: slow devices want fewer. Asked after ``load``.
        """
        return None
