"""The ``radix`` scheduler's options, and what they must agree on with the engine's limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.protocols import Limits, PluginOptions
from engine.plugins.schedulers._radix_policy import PolicyName


class RadixOptions(PluginOptions):
    """Options of the ``radix`` scheduler. The defaults decide as SGLang does."""

    policy: PolicyName = Field(
        "fcfs",
        description="queue order: as they came, longest cached prefix, the cache's tree depth first, longest "
        "output, random, the routing key that most of the running share",
    )
    chunked_prefill_size: int | None = Field(
        None, description="most prompt tokens a step; -1: prompts are never cut (default: max_batch_tokens)"
    )
    max_prefill_tokens: int = Field(16384, ge=1, description="prompt tokens after which a prefill batch is closed")
    prefill_max_requests: int | None = Field(None, ge=1, description="most requests in one prefill batch")
    enable_mixed_chunk: bool = Field(False, description="decodes ride along in prefill batches")
    schedule_conservativeness: float = Field(1.0, gt=0, description="above 1 admits less, below 1 more")
    enable_priority_scheduling: bool = Field(False, description="the requests' priority goes before the policy")
    disable_priority_preemption: bool = Field(False, description="nobody is preempted for a more urgent request")
    priority_scheduling_preemption_threshold: int = Field(
        10, ge=0, description="how much more urgent a request must be to preempt another"
    )
    retraction_policy: Literal["length", "priority"] = Field(
        "length", description="who is retracted first: fewest tokens generated, or least urgent"
    )
    prefill_delay_passes: int = Field(
        0, ge=0, description="most steps in a row that prefill is held back, so that more of it shares a batch"
    )
    prefill_delay_queue_ratio: float | None = Field(
        None, gt=0, description="hold prefill back until the queue is this share of those that decode"
    )
    prefill_delay_low_usage: float | None = Field(
        None, gt=0, le=1, description="share of the pool in use below which prefill is never held back"
    )
    bound_starvation: bool = Field(False, description="apply the two bounds below")
    max_prefill_streak: int = Field(
        16, ge=1, description="prefill batches in a row while others could decode, before these get a step"
    )
    max_overtakings: int = Field(
        64, ge=1, description="later requests that start before one, before it goes first whatever the policy"
    )
    waiting_timeout: float | None = Field(
        None, gt=0, description="seconds after which a request that has not started is aborted"
    )
    running_timeout: float | None = Field(
        None, gt=0, description="seconds after its start at which a request that is not done is aborted"
    )
    seed: int = Field(0, description="of policy random")


def chunk_size(options: RadixOptions, limits: Limits) -> int | None:
    """Most prompt tokens a step; ``None``: prompts are never cut.

    Raises:
        ConfigError: batches would not hold what must go into one.
    """
    size = options.chunked_prefill_size
    if limits.max_batch_tokens < limits.max_running:
        raise ConfigError(
            f"scheduler radix: a decode batch holds all that run, so max_batch_tokens ({limits.max_batch_tokens}) "
            f"must be at least max_running ({limits.max_running})"
        )
    if size == -1 and limits.max_batch_tokens < limits.max_model_len - 1:
        raise ConfigError(
            f"scheduler radix: without chunked prefill max_batch_tokens ({limits.max_batch_tokens}) must hold "
            f"the longest prompt ({limits.max_model_len - 1} tokens)"
        )
    chunk = None if size == -1 else min(size or limits.max_batch_tokens, limits.max_batch_tokens)
    if chunk is not None and chunk < limits.page_size:
        raise ConfigError(
            f"scheduler radix: chunks are whole pages, so chunked_prefill_size and max_batch_tokens must be at "
            f"least the page size {limits.page_size}; {chunk} is below it"
        )
    return chunk
