"""Prometheus metrics of a proxy."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.proxy.fleet import Fleet

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
OUTCOMES = ("answered", "refused", "failed", "broken", "left", "unavailable")


class Peers(Collector):
    """How the engines are when it is asked."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """A line for each engine."""
        ready = GaugeMetricFamily("engine_proxy_peer_ready", "1 while it gets requests", labels=["side", "url"])
        busy = GaugeMetricFamily("engine_proxy_peer_open", "Requests open there", labels=["side", "url"])
        known = GaugeMetricFamily("engine_proxy_peer_chunks", "Pieces of prompts known of it", labels=["side", "url"])
        for peer in (*self._fleet.prefill, *self._fleet.decode):
            ready.add_metric([peer.side, peer.url], float(peer.ready))
            busy.add_metric([peer.side, peer.url], peer.open)
            known.add_metric([peer.side, peer.url], len(peer.index))
        yield from (ready, busy, known)


class Metrics:
    """One proxy's metrics, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Peers(fleet))
        self._outcomes = self._counter("requests", "Requests by how they ended", "outcome")
        self._retries = self._counter("retries", "Requests tried on another engine", "side")
        self._pairings = self._counter("pairings", "Requests by who computed the prompt: handed over, or alone", "how")
        self._choices = self._counter("choices", "Choices of an engine: by prefix, or by load", "side", "by")
        self.prefill = self._histogram("prefill", "Time that the prefill engine took")
        self.first_byte = self._histogram("first_byte", "Request to the first byte of its answer")
        for outcome in OUTCOMES:
            self._outcomes.labels(outcome)
        for side in ("prefill", "decode"):
            self._retries.labels(side)
            for by in ("prefix", "load"):
                self._choices.labels(side, by)
        for how in ("handed", "alone"):
            self._pairings.labels(how)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"engine_proxy_{name}", words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str) -> Histogram:
        return Histogram(f"engine_proxy_{name}_seconds", words, buckets=SECONDS, registry=self.registry)

    def ended(self, outcome: str) -> None:
        """A request came to its end: one of ``OUTCOMES``."""
        self._outcomes.labels(outcome).inc()

    def retried(self, side: str) -> None:
        """A request goes to another engine of a side."""
        self._retries.labels(side).inc()

    def paired(self, handed: bool) -> None:
        """A request goes to the engine that answers it, and another has its prompt or not."""
        self._pairings.labels("handed" if handed else "alone").inc()

    def chose(self, side: str, by_prefix: bool) -> None:
        """An engine was chosen."""
        self._choices.labels(side, "prefix" if by_prefix else "load").inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
