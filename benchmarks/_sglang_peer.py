"""The real SGLang tree, queue order and admission, without a GPU, a model or weights: the peer of both ``radix``.

Needs SGLang in the running environment (written against 0.5.18; importing it takes seconds). These classes are pure
bookkeeping over index tensors, which lie in the CPU's memory here. Its scheduler loop cannot be driven without a model
worker: it is no part of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from array import array
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

VERSION = "0.5.18"
"""The version that this is written against."""

NAMES = {
    "runtime_context": ("publish",),
    "managers.schedule_batch": ("Req",),
    "managers.schedule_policy": ("AddReqResult", "PrefillAdder", "SchedulePolicy"),
    "mem_cache.allocator": ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"),
    "mem_cache.base_prefix_cache": ("EvictParams", "InsertParams", "MatchPrefixParams"),
    "mem_cache.cache_init_params": ("CacheInitParams",),
    "mem_cache.radix_cache": ("RadixCache", "RadixKey"),
    "sampling.sampling_params": ("SamplingParams",),
    "server_args": ("ServerArgs",),
}


def installed() -> str | None:
    """Version of the SGLang that can be imported here, ``None`` without one. Imports nothing."""
    if importlib.util.find_spec("sglang") is None:
        return None
    return importlib.metadata.version("sglang")


@cache
def classes() -> Any:
    """What is compared, imported; an empty configuration is published, as every SGLang process does first."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        _tolerate_known_configurations()
        found = SimpleNamespace(torch=importlib.import_module("torch"))
        for module, names in NAMES.items():
            for name in names:
                setattr(found, name, getattr(importlib.import_module(f"sglang.srt.{module}"), name))
        found.publish(_default_arguments(found.ServerArgs), role="scheduler")
        logging.disable(logging.NOTSET)
    return found


def make_cache(page_size: int, pages: int) -> tuple[Any, Any]:
    """A ``RadixCache`` over a real slot allocator, and that allocator."""
    known = classes()
    torch = known.torch
    if page_size == 1:
        allocator = known.TokenToKVPoolAllocator(pages, torch.int64, "cpu", None, False)
    else:
        allocator = known.PagedTokenToKVPoolAllocator(pages * page_size, page_size, torch.int64, "cpu", None, False)
    params = known.CacheInitParams(
        disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=page_size
    )
    return known.RadixCache(params), allocator


def make_request(name: str, prompt: Sequence[int], max_tokens: int) -> Any:
    """A waiting request."""
    known = classes()
    return known.Req(name, "", array("q", prompt), known.SamplingParams(max_new_tokens=max_tokens))


def make_policy(policy: str, tree: Any) -> Any:
    """The order of the queue, without priorities."""
    return classes().SchedulePolicy(policy, tree, False, False, False)


def make_adder(page_size: int, tree: Any, allocator: Any, input_tokens: int) -> Any:
    """The admission ledger of one prefill batch; nobody runs, prompts are not cut."""
    return classes().PrefillAdder(page_size, tree, allocator, None, 0.7, input_tokens, None)


def _tolerate_known_configurations() -> None:
    """A newer transformers knows some configurations that SGLang registers, and refuses to have them twice."""
    from transformers import AutoConfig

    register = AutoConfig.register

    def tolerant(model_type: str, config: Any, exist_ok: bool = True) -> None:
        register(model_type, config, exist_ok=True)

    AutoConfig.register = staticmethod(tolerant)  # type: ignore[method-assign,assignment]


def _default_arguments(kind: Any) -> Any:
    """``ServerArgs`` of plain defaults: making one in the usual way would look for a GPU and a model."""
    arguments = kind.__new__(kind)
    for field in dataclasses.fields(kind):
        value = "none" if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        object.__setattr__(arguments, field.name, value)
    return arguments
