"""The same under the names that dashboards for vLLM ask for, where the meaning is the same: see docs/metrics.md.

Source: vLLM's V1 metrics; the labels ``model_name`` and ``engine`` are its own, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.core.histograms import SECONDS, Histogram
from engine.core.serve.client import AsyncEngine, Measures
from engine.plugins.frontends._metrics_words import COUNTERS, HISTOGRAMS, family

SAME_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:prefix_cache_queries": "looked_up_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
}
SAME_TIMES = {
    "vllm:time_to_first_token_seconds": "first",
    "vllm:inter_token_latency_seconds": "gap",
    "vllm:e2e_request_latency_seconds": "whole",
    "vllm:request_decode_time_seconds": "decode",
}
"""vLLM's names -> what ours are kept under."""

REASONS = {"stop": ("stop",), "length": ("length",), "abort": ("abort", "timeout"), "error": ("error",)}
"""vLLM's ``finished_reason`` -> ours."""


def known_names(engine: AsyncEngine, measures: Measures | None) -> Iterable[Metric]:
    """All of them; without an engine those that clients' side knows."""
    ledger = engine.ledger
    labels = {"model_name": engine.model.name, "engine": "0"}
    success = CounterMetricFamily(
        "vllm:request_success", "Requests by how they ended", labels=[*labels, "finished_reason"]
    )
    for reason, ours in REASONS.items():
        success.add_metric([*labels.values(), reason], sum(ledger.ended[one] for one in ours))
    yield success
    for name, key in SAME_TIMES.items():
        yield family(name, HISTOGRAMS[key][1], {"": getattr(ledger.times, key)}, more=labels)
    queued = Histogram.of(SECONDS)
    for histogram in ledger.times.queue.values():
        queued.merge(histogram)
    yield family("vllm:request_queue_time_seconds", "Waiting to begin", {"": queued}, more=labels)
    if measures is not None:
        yield from _of_core(measures, labels)


def _of_core(measures: Measures, labels: Mapping[str, str]) -> Iterable[Metric]:
    values = measures.values
    total = values["pages_total"]
    gauges = {
        "vllm:num_requests_running": ("Requests that hold KV pages", values["running"]),
        "vllm:num_requests_waiting": ("Requests that wait", values["waiting"] + values["parked"]),
        "vllm:kv_cache_usage_perc": ("Share of the KV pages in use, 1 is all", values["pages_pinned"] / total),
    }
    for name, (words, value) in gauges.items():
        gauge = GaugeMetricFamily(name, words, labels=[*labels])
        gauge.add_metric([*labels.values()], value)
        yield gauge
    for name, key in SAME_COUNTERS.items():
        counter = CounterMetricFamily(name, COUNTERS[key][1], labels=[*labels])
        counter.add_metric([*labels.values()], values[key])
        yield counter
    tokens = {"": measures.histograms["batch_tokens"]}
    yield family("vllm:iteration_tokens_total", HISTOGRAMS["batch_tokens"][1], tokens, more=labels)
