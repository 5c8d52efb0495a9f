"""What the levels of a SGLang recording share: names of things, and an engine core set up as the recording was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.core.identity import namespace_digest, pack
from engine.core.loop import EngineCore
from engine.core.protocols import Executor, Limits
from engine.core.replay.cores import ANY_TOKEN, core_for
from engine.core.request import Request, SamplingParams

Trace = Mapping[str, Any]
UNBOUNDED = 10**6
DEFAULT_MAX_TOKENS = 16
LOWEST_PRIORITY = 10**9  # of a request without one, where priorities count


def adapter_of(entry: Trace) -> str:
    """``extra_key`` as an adapter's name: empty is not absent."""
    extra = entry.get("extra_key")
    return "" if extra is None else f"={extra}"


def namespace(entry: Trace) -> bytes:
    """Of ``extra_key`` and ``cache_salt`` (where empty is absent)."""
    return namespace_digest("", adapter_of(entry), entry.get("cache_salt") or "")


def slots(pages: Iterable[int], size: int) -> list[int]:
    """The token slots of pages."""
    return [page * size + offset for page in pages for offset in range(size)]


def priority_of(entry: Trace, config: Trace) -> int:
    """Ours: the smaller, the more urgent."""
    priority = entry.get("priority")
    if priority is None:
        return LOWEST_PRIORITY if config.get("enable_priority_scheduling") else 0
    return int(priority if config.get("schedule_low_priority_values_first") else -priority)


def core_of(
    config: Trace, options: Mapping[str, Any], *, pages: int, executor: Executor | None = None, **limits: int
) -> EngineCore:
    """A core with the ``radix`` scheduler and cache.

    Args:
        options: the scheduler's, beside those that all levels have.
        pages: pages in the pool.
        limits: fields of ``Limits`` that are not unbounded.
    """
    decisions = {"enable_priority_scheduling": config.get("enable_priority_scheduling", False), **options}
    caching = {
        "enable_prefix_caching": not config.get("disable_radix_cache", False),
        "eviction_policy": config.get("radix_eviction_policy", "lru"),
    }
    bounds = {
        "max_model_len": UNBOUNDED,
        "max_batch_tokens": UNBOUNDED,
        "max_running": UNBOUNDED,
        "page_size": config["page_size"],
        "num_pages": pages,
        "vocab_size": ANY_TOKEN,
        **limits,
    }
    model = None if executor is None else executor.load()
    return core_for(Limits(**bounds), ("radix", decisions), ("radix", caching), model=model, executor=executor)


def submit(core: EngineCore, entry: Trace, config: Trace) -> Request:
    """Queue a recorded request, with the output that it has already."""
    max_tokens = entry.get("max_tokens")
    request = core.add(
        entry["prompt"],
        SamplingParams(
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stop_token_ids=tuple(entry.get("stop_token_ids") or ()),
            ignore_eos=bool(entry.get("ignore_eos")),
        ),
        request_id=entry["id"],
        priority=priority_of(entry, config),
        salt=entry.get("cache_salt") or "",
        adapter=adapter_of(entry),
        metadata={} if entry.get("routing_key") is None else {"routing_key": entry["routing_key"]},
    )
    request.tokens += entry.get("output") or []
    return request


def remember(core: EngineCore, entry: Trace) -> None:
    """Put a token sequence into the tree, unpinned, on pages of the pool."""
    tree: Any = core.kv.tree  # type: ignore[attr-defined]
    pages = core.pool.take(len(entry["key"]) // core.pool.page_size)
    _, have = tree.insert(pack(entry["key"]), namespace(entry), pages)
    core.pool.give(pages[:have])
