"""Names and words of our metrics, and histograms as Prometheus has them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import HistogramMetricFamily

from engine.core.histograms import Histogram

GAUGES = {
    "running": ("engine_requests_running", "Requests that hold KV pages"),
    "waiting": ("engine_requests_waiting", "Requests in the queue"),
    "waiting_tokens": ("engine_waiting_tokens", "Prompt tokens of requests that have not begun"),
    "parked": ("engine_requests_parked", "Requests that are not ready to run"),
    "pages_total": ("engine_kv_pages", "KV pages in the pool"),
    "pages_free": ("engine_kv_pages_free", "KV pages without content"),
    "pages_evictable": ("engine_kv_pages_evictable", "KV pages with cached content that nobody uses"),
    "pages_pinned": ("engine_kv_pages_pinned", "KV pages in use"),
}
COUNTERS = {
    "steps": ("engine_steps", "Steps"),
    "preemptions": ("engine_preemptions", "Requests that gave up their pages and were queued again"),
    "prompt_tokens": ("engine_prompt_tokens", "Prompt tokens of accepted requests"),
    "output_tokens": ("engine_output_tokens", "Generated tokens"),
    "looked_up_tokens": ("engine_looked_up_tokens", "Tokens of requests as they began, looked up in the prefix cache"),
    "cached_tokens": ("engine_cached_tokens", "Tokens that the prefix cache gave"),
    "computed_tokens": ("engine_computed_tokens", "Tokens that were computed"),
    "recomputed_tokens": ("engine_recomputed_tokens", "Tokens whose KV preempted requests gave up"),
    "evicted_pages": ("engine_evicted_pages", "Cached KV pages that were evicted"),
    "failed_steps": ("engine_failed_steps", "Steps that the executor could not compute"),
    "loaded_tokens": ("engine_loaded_tokens", "Tokens whose KV came from connectors"),
    "failed_loads": ("engine_failed_loads", "Loads of which a part or all did not come"),
    "late_loads": ("engine_late_loads", "Look-ups and loads that were not waited for any longer"),
    "failed_saves": ("engine_failed_saves", "Transfers to connectors that failed"),
    "unsaved_pages": ("engine_unsaved_pages", "KV pages not handed to connectors, which had enough to save"),
}
HISTOGRAMS = {
    "first": ("engine_time_to_first_token_seconds", "Acceptance of a request to its first token"),
    "gap": ("engine_inter_token_seconds", "Gap between tokens of one request"),
    "whole": ("engine_request_seconds", "Acceptance of a request to its end, whatever the reason"),
    "decode": ("engine_decode_seconds", "First token of a request to its end"),
    "queue": ("engine_queue_seconds", "Waiting to begin, by what was waited for last (none: nothing)"),
    "step_seconds": ("engine_step_seconds", "Steps that computed something"),
    "batch_tokens": ("engine_batch_tokens", "Tokens that a step computed"),
}


def family(
    name: str, words: str, found: Mapping[str, Histogram], *, label: str = "", more: Mapping[str, str] | None = None
) -> HistogramMetricFamily:
    """Histograms as one family: by ``label``, or a single one under any name. ``more`` are labels of all of them."""
    more = more or {}
    metric = HistogramMetricFamily(name, words, labels=[*more, *([label] if label else [])])
    for value, histogram in found.items():
        buckets = [(_written(bound), float(count)) for bound, count in histogram.cumulative()]
        metric.add_metric([*more.values(), *([value] if label else [])], buckets, histogram.total)
    return metric


def _written(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)
