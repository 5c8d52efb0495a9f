"""Makes a workload smaller as long as it still shows the same thing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

Workload = dict[str, Any]

_SIMPLE_CONFIG = {
    "policy": "fcfs",
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
    "reserve_full_isl": True,
    "enable_prefix_caching": True,
}
_SIMPLE_REQUEST = {"cache_salt": None, "stop_token_ids": [], "abort_step": None, "priority": 0, "arrival_time": 0}
_OPTIONAL = ("lora_name", "skip_reading_prefix_cache", "min_tokens", "abort_phase")


def shrink(workload: Workload, shows: Callable[[Workload], bool], tries: int = 2000) -> Workload:
    """The smallest workload found for which ``shows`` holds; ``workload`` itself if nothing smaller does."""
    best, at, found = workload, 0, False
    while tries > 0:
        candidate = next(itertools.islice(_smaller(best), at, None), None)
        if candidate is None:  # the end of a round: another one if this one helped
            if not found:
                break
            at, found = 0, False
            continue
        tries -= 1
        if shows(candidate):
            best, found = candidate, True  # what follows the cut stands at the same place now
        else:
            at += 1
    return best


def _smaller(workload: Workload) -> Iterator[Workload]:
    """Large cuts first."""
    count = len(workload["requests"])
    size = count // 2
    while size:
        for start in range(0, count, size):
            yield _with(workload, lambda w, a=start, n=size: w["requests"].__delitem__(slice(a, a + n)))
        size //= 2
    if workload.get("actions"):
        yield _with(workload, lambda w: w.pop("actions"))
    for name, value in _SIMPLE_CONFIG.items():
        if workload["config"][name] != value:
            yield _with(workload, lambda w, n=name, v=value: w["config"].__setitem__(n, v))
    if workload["config"]["spec_method"] is not None:
        yield _with(workload, _without_drafts)
    for index in range(count):
        yield from _smaller_request(workload, index)


def _smaller_request(workload: Workload, index: int) -> Iterator[Workload]:
    request = workload["requests"][index]

    def changed(change: Callable[[Workload], Any]) -> Workload:
        return _with(workload, lambda w: change(w["requests"][index]))

    for name in _OPTIONAL:
        if name in request:
            yield changed(lambda r, n=name: r.pop(n))
    for name, value in _SIMPLE_REQUEST.items():
        if request[name] != value:
            yield changed(lambda r, n=name, v=value: r.__setitem__(n, v))
    for step in {0, request["arrival_step"] // 2, request["arrival_step"] - 1}:
        if 0 <= step < request["arrival_step"]:
            yield changed(lambda r, s=step: r.__setitem__("arrival_step", s))
    for length in _shorter(len(request["output"])):
        yield changed(lambda r, n=length: _cut_output(r, n))
    for length in _shorter(len(request["prompt"])):
        yield changed(lambda r, n=length: r.__setitem__("prompt", r["prompt"][:n]))


def _shorter(length: int) -> Iterator[int]:
    for cut in (length // 2, length // 4, 1):
        if 0 < cut < length:
            yield length - cut


def _cut_output(request: Workload, length: int) -> None:
    request["output"] = request["output"][:length]
    request["max_tokens"] = length
    if "min_tokens" in request:
        request["min_tokens"] = min(request["min_tokens"], length)
    if "drafts" in request:
        request["drafts"] = request["drafts"][: length + 1]


def _without_drafts(workload: Workload) -> None:
    config = workload["config"]
    config |= {"spec_method": None, "num_spec_tokens": 0, "num_lookahead_tokens": 0, "eagle_drop_last_block": False}
    config["max_num_batched_tokens"] = config["max_num_scheduled_tokens"]
    for request in workload["requests"]:
        request.pop("drafts", None)


def _with(workload: Workload, change: Callable[[Workload], Any]) -> Workload:
    smaller = copy.deepcopy(workload)
    change(smaller)
    return smaller
