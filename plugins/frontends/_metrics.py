"""Prometheus metrics. Gauges are read when they are scraped, so they cannot freeze at an old value."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.containment import STAT, STAT_DISABLED

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
    "cached_tokens": ("engine_cached_tokens", "Tokens that the prefix cache gave"),
    "computed_tokens": ("engine_computed_tokens", "Tokens that were computed"),
    "failed_steps": ("engine_failed_steps", "Steps that the executor could not compute"),
    "loaded_tokens": ("engine_loaded_tokens", "Tokens whose KV came from connectors"),
    "failed_loads": ("engine_failed_loads", "Loads of which a part or all did not come"),
    "late_loads": ("engine_late_loads", "Look-ups and loads that were not waited for any longer"),
    "failed_saves": ("engine_failed_saves", "Transfers to connectors that failed"),
    "unsaved_pages": ("engine_unsaved_pages", "KV pages not handed to connectors, which had enough to save"),
}
SCHEDULER, CONNECTOR = "scheduler_", "connector_"
LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Snapshot(Collector):
    """What the engine said at scrape time, as metric families."""

    def __init__(self) -> None:
        self.up = False
        self.stats: Mapping[str, int | float] | None = None
        self.accepted = 0
        self.ended: Mapping[str, int] = {}
        self.refused: Counter[str] = Counter()

    def collect(self) -> Iterable[Metric]:
        """All families. Without an engine nothing runs and nothing waits; what it had counted is gone with it."""
        yield GaugeMetricFamily("engine_up", "1 while the engine core lives", value=float(self.up))
        yield CounterMetricFamily("engine_requests_accepted", "Requests accepted", value=self.accepted)
        ended = CounterMetricFamily("engine_requests_ended", "Accepted requests by how they ended", labels=["reason"])
        for reason, count in self.ended.items():
            ended.add_metric([reason], count)
        yield ended
        refused = CounterMetricFamily("engine_http_errors", "HTTP answers that refused or failed", labels=["status"])
        for status, count in self.refused.items():
            refused.add_metric([status], count)
        yield refused
        if self.stats is None:
            return
        for key, (name, words) in GAUGES.items():
            yield GaugeMetricFamily(name, words, value=self.stats.get(key, 0))
        for key, (name, words) in COUNTERS.items():
            yield CounterMetricFamily(name, words, value=self.stats.get(key, 0))
        yield from plugin_families(self.stats)
        yield from own_families(self.stats)


def plugin_families(stats: Mapping[str, int | float]) -> Iterable[Metric]:
    """Faults of contained plugins by plugin and kind, and who was disabled for them."""
    faults = CounterMetricFamily(
        "engine_plugin_faults",
        "Faults of policies and connectors: raised, answered (nonsense), slow, changed (a request)",
        labels=["plugin", "kind"],
    )
    disabled = GaugeMetricFamily(
        "engine_plugin_disabled", "1 where a plugin had so many faults that it is asked no more", labels=["plugin"]
    )
    for key, value in stats.items():
        if key.startswith(STAT):
            plugin, _, kind = key.removeprefix(STAT).rpartition(":")
            faults.add_metric([plugin, kind], value)
        elif key.startswith(STAT_DISABLED):
            disabled.add_metric([key.removeprefix(STAT_DISABLED)], value)
    yield faults
    yield disabled


def own_families(stats: Mapping[str, int | float]) -> Iterable[Metric]:
    """Numbers that the scheduler and the connectors keep of themselves."""
    scheduler = GaugeMetricFamily("engine_scheduler", "Numbers of the scheduler's own, by name", labels=["name"])
    connector = GaugeMetricFamily(
        "engine_connector", "Numbers of a connector's own, by name", labels=["connector", "name"]
    )
    for key, value in stats.items():
        if key.startswith(SCHEDULER):
            scheduler.add_metric([key.removeprefix(SCHEDULER)], value)
        elif key.startswith(CONNECTOR):
            connector.add_metric(key.removeprefix(CONNECTOR).split("_", 1), value)
    yield scheduler
    yield connector


class Metrics:
    """One server's metrics, in a registry of their own (several servers may live in one process)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.snapshot = Snapshot()
        self.registry.register(self.snapshot)
        self._first = self._histogram("engine_time_to_first_token_seconds", "Request to first token", LATENCY)
        self._gap = self._histogram("engine_inter_token_seconds", "Gap between tokens of one request", GAPS)
        self._whole = self._histogram("engine_request_seconds", "Request to its end", LATENCY)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, words, buckets=buckets, registry=self.registry)

    def timer(self) -> Timer:
        """Starts the clock of one request."""
        return Timer(self._first, self._gap, self._whole)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class Timer:
    """Times one choice: when its tokens came, and its end."""

    def __init__(self, first: Histogram, gap: Histogram, whole: Histogram) -> None:
        self._first, self._gap, self._whole = first, gap, whole
        self._start = time.monotonic()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """So many tokens came together. Their gap is shared out evenly; the first to come have none."""
        if not count:
            return
        now = time.monotonic()
        if self._last is None:
            self._first.observe(now - self._start)
        else:
            for _ in range(count):
                self._gap.observe((now - self._last) / count)
        self._last = now

    def end(self) -> None:
        """The choice is complete."""
        self._whole.observe(time.monotonic() - self._start)
