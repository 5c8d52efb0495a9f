"""Decision traces of SGLang's scheduler and cache, replayed on ``radix`` and ``radix``. Four levels, told by content.

* radix: operations on the tree alone, or with the pool and requests.
* policy: passes of the queue order over a tree and a waiting queue.
* adder: the admission ledger, call by call.
* loop: the whole scheduler, one record an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.core.replay import sglang_adder, sglang_loop, sglang_policy, sglang_radix
from engine.core.replay.report import NotReplayable, Report

Trace = Mapping[str, Any]

LEVELS: Mapping[str, Callable[[Trace], Report]] = {
    "radix": sglang_radix.replay,
    "policy": sglang_policy.replay,
    "adder": sglang_adder.replay,
    "loop": sglang_loop.replay,
}


def level(data: Trace) -> str | None:
    """The level of such a trace; ``None`` where it is none."""
    config = data.get("config")
    if not isinstance(config, Mapping):
        return None
    if "rounds" in data and "max_total_num_tokens" in config:
        return "adder"
    if "ops" in data and "eviction_policy" in config:
        return "radix"
    if "ops" in data and "schedule_policy" in config:
        return "policy"
    if "trace" in data and "chunked_prefill_size" in config:
        return "loop"
    return None


def recognises(data: Trace) -> bool:
    """Whether the data are such a trace, told by their content."""
    return level(data) is not None


def replay(data: Trace) -> Report:
    """Decide anew and compare, up to the first difference.

    Raises:
        NotReplayable: a level that is not decided yet.
    """
    found = level(data)
    if found is None or found not in LEVELS:
        raise NotReplayable(f"level {found} is not decided yet")
    return LEVELS[found](data)
