"""An engine core for a replay: plugins by name, limits as recorded, outcomes from the recording."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.errors import ExecutionError
from engine.core.loop import EngineCore
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor, KVCache, Limits, ModelInfo, Policy, Scheduler
from engine.core.registry import make

ANY_TOKEN = 2**31  # the vocabulary of a recording is not known

Choice = tuple[str, Mapping[str, Any]]
"""A plugin's name and its options."""


class NotComputed(Executor):
    """Stands where outcomes come from the recording, or nothing is ever executed."""

    name = "recorded"

    def load(self) -> ModelInfo:
        """There is no model."""
        raise ExecutionError("a recording has no model")

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""

    def execute(self, plan: Plan) -> Outcome:
        """Not asked."""
        raise ExecutionError("a recording is not computed")


def core_for(
    limits: Limits,
    scheduler: Choice,
    kvcache: Choice | KVCache,
    *,
    model: ModelInfo | None = None,
    executor: Executor | None = None,
    policies: Sequence[Policy] = (),
    overlap: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """A core with these plugins. Raises as ``registry.make`` does.

    Args:
        kvcache: by name, or an instance.
        model: default: one that knows every token, as long as the limits allow.
        executor: default: none computes.
    """
    chosen = make("scheduler", *scheduler)
    kv = kvcache if isinstance(kvcache, KVCache) else make("kvcache", *kvcache)
    assert isinstance(chosen, Scheduler)
    assert isinstance(kv, KVCache)
    return EngineCore(
        limits=limits,
        model=model or ModelInfo(name="recorded", vocab_size=limits.vocab_size, max_model_len=limits.max_model_len),
        scheduler=chosen,
        kv=kv,
        executor=executor or NotComputed(),
        policies=policies,
        overlap=overlap,
        clock=clock,
    )
