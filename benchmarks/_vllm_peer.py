"""The real vLLM scheduler and KV manager, without a GPU, a model or weights: the peer of ``unified`` and ``paged``.

Needs vLLM in the running environment (written against 0.27.1; importing it takes seconds). Its scheduler is pure
bookkeeping: with one full-attention KV group and a made-up model configuration it runs on any machine, and whoever
drives it plays the model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

VERSION = "0.27.1"
"""The version whose decisions are recorded; another may decide differently."""

# Read when vLLM is imported. It tells of the missing GPU at every start, and of Triton's absence as an error.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

_LONGEST = 131_072
_SPEC_METHODS = ("ngram", "draft_model", "eagle")
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": _LONGEST,
    "vocab_size": 32_000,
    "dtype": "float32",
}


def installed() -> str | None:
    """Version of the vLLM that can be imported here, ``None`` without one. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return None
    return importlib.metadata.version("vllm")


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    asynchronous: bool = False,
    policy: str = "fcfs",
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    long_prefill_token_threshold: int = 0,
    reserve_full_isl: bool = True,
    watermark: float = 0.0,
    spec_method: str | None = None,
    num_spec_tokens: int = 0,
) -> Any:
    """A ``Scheduler`` or ``AsyncScheduler`` over ``num_blocks`` blocks, of which vLLM reserves the first.

    Without statistics, events, connectors or multi-modal inputs. The arguments are vLLM's own settings; all others are
    as shipped.
    """
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    folder = _model_folder()
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
    )
    parallel = ParallelConfig()
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            policy=policy,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduler_reserve_full_isl=reserve_full_isl,
            watermark=watermark,
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        speculative_config=_speculation(spec_method, num_spec_tokens, model, parallel),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    group = KVCacheGroupSpec(
        ["layer"], FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=False,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    hasher: Callable[[Any], Any] | None,
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str | None = None,
    lora_name: str | None = None,
    skip_reading_prefix_cache: bool | None = None,
) -> Any:
    """A vLLM ``Request``, its prompt's blocks hashed (that is when vLLM does it). No end-of-sequence id is set."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        skip_reading_prefix_cache=skip_reading_prefix_cache,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        lora_request=LoRARequest(lora_name, 1, lora_name) if lora_name else None,
        block_hasher=hasher,
    )


def make_hasher(block_size: int) -> Callable[[Any], Any]:
    """The block hasher that vLLM's engine gives to its requests, with its default hash (SHA-256)."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


def _speculation(method: str | None, tokens: int, model: Any, parallel: Any) -> Any:
    if method is None:
        return None
    if method not in _SPEC_METHODS:
        raise ValueError(f"drafts by {method!r} are not among {_SPEC_METHODS}")
    from vllm.config import SpeculativeConfig

    drafter = {"prompt_lookup_max": 3} if method == "ngram" else {"model": _model_folder()}
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=tokens,
        target_model_config=model,
        target_parallel_config=parallel,
        **drafter,
    )


@cache
def _model_folder() -> str:
    holder = tempfile.TemporaryDirectory(prefix="vllm-peer-")
    _KEPT.append(holder)
    Path(holder.name, "config.json").write_text(json.dumps(_MODEL))
    return holder.name


_KEPT: list[Any] = []  # temporary folders live as long as the process
