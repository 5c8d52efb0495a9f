"""What an experiment is: one decision with several answers (sides), the same arrivals for each, at several seeds.

    case (a workload at a point of a sweep) x seed ──▶ arrivals ──▶ each side ──▶ figures

Sides differ in one decision; all else of a case is the same for each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineConfig
from engine.core.config import Selection
from engine.lab import SLO, Results, Simulation, Timed, Workload
from engine.lab.executor import WHERE

SEEDS = (1, 2, 3)
ENDLESS = {"max_waiting": 10**6, "max_waiting_tokens": 2**40}  # no side wins by refusing
Figures = dict[str, float]
Make = Callable[[int, float], Workload]
"""Arrivals of a seed; the second argument is the part of the requests that is wanted: 1, and less for ``--quick``."""


@dataclass(frozen=True, slots=True)
class Side:
    """An answer to the decision. ``config``: what it sets of ``EngineConfig``. ``value``: its place on an axis, where
    the decision is a number."""

    name: str
    config: Mapping[str, Any]
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload at a point of its sweep.

    Attributes:
        workload: its name; cases of one name are a line of the comparison, and a column of the plots.
        x: the point.
        make: its arrivals.
        slo: limits of a request; by tenant where they differ.
        config: what is set for all sides alike.
    """

    workload: str
    x: float
    make: Make
    slo: SLO | Mapping[str, SLO]
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure that pages show: its name in ``figures``, what it is called, what it is multiplied with, its format."""

    figure: str
    label: str
    times: float = 1.0
    format: str = ".3g"


GOODPUT = Shown("goodput", "goodput, req/s", format=".2f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One decision, and all that is needed to try it and to tell of it.

    Attributes:
        name, title: of its page.
        question: what is decided, and what is the same on all sides.
        known: what the literature says of it, and where.
        x: what a case's ``x`` is.
        sides, cases: what is simulated.
        real_sides, real: what is run on the default model (``real_sides`` empty: all sides).
        shown: columns of the tables.
        panels: rows of the plots.
        workloads: what each workload is, by its name.
        reading: what the figures say, written by whoever looked at them.
        real_reading: the same of those of the real model.
        numbers: whether the decision is a number, which is the plots' horizontal axis then; its name.
        cpu: whether the scheduler's CPU time is measured.
    """

    name: str
    title: str
    question: str
    known: str
    x: str
    sides: Sequence[Side]
    cases: Sequence[Case]
    real: Sequence[Case]
    shown: Sequence[Shown]
    panels: Sequence[Shown]
    workloads: Mapping[str, str]
    reading: str
    real_reading: str = ""
    real_sides: Sequence[str] = ()
    numbers: str = ""
    cpu: bool = False

    def tried(self) -> Sequence[Side]:
        """The sides that are run on the real model."""
        return [side for side in self.sides if not self.real_sides or side.name in self.real_sides]


def chosen(name: str, **options: Any) -> Selection:
    """A plugin with its options."""
    return Selection(name=name, options=options)


def device(**options: Any) -> dict[str, Any]:
    """Options of the modelled executor, for ``Case.config``."""
    return {"executor": chosen(WHERE, **options)}


def config_of(case: Case, side: Side, **base: Any) -> EngineConfig:
    """The engine of a side: an H100 with Llama 3 8B, where the case says nothing else. Beside the keys of
    ``EngineConfig`` there is ``kv_tokens``: the pool's size, whatever the pages'."""
    given = {"model": "llama-3-8b", **ENDLESS, **base, **case.config, **side.config}
    if (tokens := given.pop("kv_tokens", None)) is not None:
        given["num_pages"] = tokens // given["page_size"]
    return EngineConfig(**given)


def simulated(case: Case, side: Side, seed: int, scale: float, *, cpu: bool = False) -> Figures:
    """Figures of one run."""
    simulation = Simulation(config_of(case, side), case.make(seed, scale))
    spent = _watched(simulation) if cpu else None
    results = simulation.run()
    found = figures(results, case.slo)
    if spent is not None:
        found["plan_us"] = spent() * 1e6 / max(1, found["steps"])
    return found


def _watched(simulation: Simulation) -> Callable[[], float]:
    """Measure the CPU seconds of planning; they are there when the simulation is over."""
    core, spent = simulation.replicas[0].core, [0.0]
    plan = core.plan

    def timed() -> Any:
        began = time.thread_time()
        try:
            return plan()
        finally:
            spent[0] += time.thread_time() - began

    core.plan = timed
    return lambda: spent[0]


def figures(results: Results, slo: SLO | Mapping[str, SLO]) -> Figures:
    """All that pages may show of a run, by name; times in seconds. Does not mutate.

    Goodput is over the time in which requests come: what the last one takes to end says nothing of a rate.
    """
    total = results.summary()
    came = [one.arrival for one in results.requests]
    span = max(came) - min(came)
    good = sum(_slo(slo, one).kept(one) for one in results.requests)
    found: Figures = {
        "goodput": good / span,
        "kept": good / len(results.requests),
        "throughput": total["requests_per_second"],
        "tokens": total["output_tokens_per_second"],
        "hit_tokens": float(sum(one.cached for one in results.requests)),
        "cached": total["cached_share"],
        "preemptions": float(total["preemptions"]),
        "recomputed": float(total["recomputed_tokens"]),
        "rows": total["rows_a_step"] or 0.0,
        "steps": float(total["steps"]),
        "busy": total["busy_share"],
        **_spreads(total, ""),
    }
    tenants = sorted({one.tenant for one in results.requests})
    if len(tenants) > 1:
        found["fairness"] = jain(_mean_ttft(results.requests, tenant) for tenant in tenants)
    if len(tenants) == 2:
        for tenant in tenants:
            found |= _of_tenant(results.requests, tenant, span, slo)
    return found


def _slo(slo: SLO | Mapping[str, SLO], one: Timed) -> SLO:
    return slo if isinstance(slo, SLO) else slo[one.tenant]


def _spreads(total: Mapping[str, Any], before: str) -> Figures:
    names = (("ttft", ("mean", "p50", "p99")), ("itl", ("p50", "p99")), ("tpot", ("mean", "p99")),
             ("stall", ("p50", "p99")), ("queue", ("max",)), ("e2e", ("mean", "p99")))  # fmt: skip
    return {f"{before}{name}.{which}": total[name][which] or 0.0 for name, wanted in names for which in wanted}


def _of_tenant(requests: Iterable[Timed], tenant: str, seconds: float, slo: SLO | Mapping[str, SLO]) -> Figures:
    from engine.lab.measured import spread

    own = [one for one in requests if one.tenant == tenant]
    found: Figures = {f"{tenant}.goodput": sum(_slo(slo, one).kept(one) for one in own) / seconds}
    for name in ("ttft", "queue", "e2e", "itl", "stall"):
        values = spread(value for one in own if (value := getattr(one, name)) is not None)
        found |= {f"{tenant}.{name}.{which}": values[which] or 0.0 for which in ("mean", "p50", "p99", "max")}
    return found


def _mean_ttft(requests: Iterable[Timed], tenant: str) -> float:
    waits = [one.ttft for one in requests if one.tenant == tenant and one.ttft is not None]
    return sum(waits) / len(waits) if waits else 0.0


def jain(values: Iterable[float]) -> float:
    """Jain's index of fairness: 1 where all are alike, 1/n where one has everything (Jain et al., 1984)."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0
