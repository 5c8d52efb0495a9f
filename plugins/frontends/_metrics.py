"""Prometheus metrics: read when they are scraped, so that no gauge freezes at an old value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.containment import STAT, STAT_DISABLED
from engine.core.plan import Why
from engine.core.serve.client import AsyncEngine, Measures
from engine.core.serve.ledger import Ledger
from engine.plugins.frontends._life import Life, State
from engine.plugins.frontends._metrics_vllm import known_names
from engine.plugins.frontends._metrics_words import COUNTERS, GAUGES, HISTOGRAMS, family
from engine.plugins.frontends._watched import Answered

SCHEDULER, CONNECTOR = "scheduler_", "connector_"


class Snapshot(Collector):
    """What is so at one moment, as metric families. Without an engine nothing runs and nothing waits; what it had
    counted is gone with it, what clients had of it is not."""

    def __init__(
        self, engine: AsyncEngine, life: Life, measures: Measures | None, answered: Answered, errors: Counter[str]
    ) -> None:
        self._engine, self._life, self._measures = engine, life, measures
        self._answered, self._errors = answered, errors

    def collect(self) -> Iterable[Metric]:
        """All families."""
        ledger, measures = self._engine.ledger, self._measures
        yield from self._of_life()
        yield from self._of_http()
        yield from requests(ledger)
        yield from tenants(ledger)
        if measures is not None:
            for key, (name, words) in GAUGES.items():
                yield GaugeMetricFamily(name, words, value=measures.values.get(key, 0))
            for key, (name, words) in COUNTERS.items():
                yield CounterMetricFamily(name, words, value=measures.values.get(key, 0))
            yield waits(measures.waits)
            for key in ("step_seconds", "batch_tokens"):
                yield family(*HISTOGRAMS[key], {"": measures.histograms[key]})
            yield from plugin_families(measures.values)
            yield from own_families(measures.values)
        yield from known_names(self._engine, measures)

    def _of_life(self) -> Iterable[Metric]:
        said = self._life.describe()
        yield GaugeMetricFamily("engine_up", "1 while the engine core lives", value=float(self._engine.health().ok))
        yield GaugeMetricFamily("engine_ready", "1 while requests are accepted and get on", value=float(said["ready"]))
        state = GaugeMetricFamily("engine_state", "1 for the state that the server is in", labels=["state"])
        for one in State:
            state.add_metric([one.value], float(one.value == said["state"]))
        yield state

    def _of_http(self) -> Iterable[Metric]:
        errors = CounterMetricFamily("engine_http_errors", "HTTP answers that refused or failed", labels=["status"])
        for status, count in self._errors.items():
            errors.add_metric([status], count)
        yield errors
        answered = CounterMetricFamily(
            "engine_http_requests", "HTTP requests; status 499: the client left first", labels=["path", "status"]
        )
        for (path, code), count in sorted(self._answered.counts.items()):
            answered.add_metric([path, str(code)], count)
        yield answered


def requests(ledger: Ledger) -> Iterable[Metric]:
    """Accepted requests, how they ended, and how long they took."""
    yield CounterMetricFamily("engine_requests_accepted", "Requests accepted", value=ledger.accepted)
    ended = CounterMetricFamily("engine_requests_ended", "Accepted requests by how they ended", labels=["reason"])
    for reason, count in ledger.ended.items():
        ended.add_metric([reason], count)
    yield ended
    times = ledger.times
    for key in ("first", "gap", "whole", "decode"):
        yield family(*HISTOGRAMS[key], {"": getattr(times, key)})
    yield family(*HISTOGRAMS["queue"], times.queue, label="reason")


def waits(found: Mapping[str, int]) -> Metric:
    """Requests by what they wait for; all reasons are there, so that dashboards see zeros."""
    metric = GaugeMetricFamily("engine_requests_waiting_for", "Requests by why they wait", labels=["reason"])
    for reason in Why:
        metric.add_metric([reason.value], found.get(reason.value, 0))
    return metric


def tenants(ledger: Ledger) -> Iterable[Metric]:
    """Counts by the label of the API key."""
    accepted = CounterMetricFamily("engine_tenant_requests_accepted", "Requests accepted, by tenant", labels=["tenant"])
    ended = CounterMetricFamily(
        "engine_tenant_requests_ended", "Accepted requests by tenant and how they ended", labels=["tenant", "reason"]
    )
    prompt = CounterMetricFamily("engine_tenant_prompt_tokens", "Prompt tokens of ended requests", labels=["tenant"])
    output = CounterMetricFamily("engine_tenant_output_tokens", "Output tokens of ended requests", labels=["tenant"])
    for tenant, share in ledger.tenants.shares.items():
        accepted.add_metric([tenant], share.accepted)
        prompt.add_metric([tenant], share.prompt_tokens)
        output.add_metric([tenant], share.output_tokens)
        for reason, count in share.ended.items():
            ended.add_metric([tenant, reason], count)
    yield from (accepted, ended, prompt, output)


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
    """What one server counts of its own, and how all of it is told.

    Attributes:
        answered: HTTP requests.
        errors: error answers by status, those in the middle of a stream included.
    """

    def __init__(self) -> None:
        self.answered = Answered()
        self.errors: Counter[str] = Counter()

    def render(self, engine: AsyncEngine, life: Life, measures: Measures | None) -> bytes:
        """The exposition text. ``measures`` is ``None`` where the engine does not answer."""
        registry = CollectorRegistry()
        registry.register(Snapshot(engine, life, measures, self.answered, self.errors))
        return generate_latest(registry)
