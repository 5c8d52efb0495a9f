"""``engine plugins check``: a plugin's suite, a fuzz of hostile workloads, and what it costs. Needs no pytest."""

from __future__ import annotations

import importlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.core.protocols import ROLES
from engine.core.registry import Found, Registry
from engine.testing.cost import Cost, measure
from engine.testing.suites import SUITES, Law, Suite
from engine.testing.watched import Place
from engine.testing.workload import Situation

Watch = Callable[[Place], None]

FUZZ_RULE = (
    "Under any hostile workload every request ends, says what the model says, and reads no KV but its own; "
    "nothing leaks."
)
COST_RULE = "A step costs at most {limit:g} times what it costs without the plugin."
FUZZED = ("scheduler", "kvcache", "policy")


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that does not hold. ``where`` says how to see it again."""

    rule: str
    words: str
    where: str


@dataclass(slots=True)
class Report:
    """What a check found out. ``finding`` is the first violation; ``None``: all holds."""

    found: Found
    seed: int
    rules: int = 0  # that hold
    workloads: int = 0  # that hold
    cost: Cost | None = None
    finding: Finding | None = None
    notes: list[str] = field(default_factory=list)


def suite_of(found: Found, options: Mapping[str, Any]) -> type[Suite]:
    """The suite of the plugin's role, about this plugin."""
    return type(
        f"{found.cls.__name__}Check",
        (SUITES[found.role],),
        {"plugin": found.cls, "origin": found, "options": dict(options)},
    )


def suites(target: str, registry: Registry, options: Mapping[str, Any]) -> list[type[Suite]]:
    """What there is to check under a name: of a plugin, of a distribution, ``pkg.module:Class`` of either a plugin or
    a suite. Empty where nothing has that name.

    Raises:
        PluginError: it cannot be imported, or was written for another contract.
    """
    if ":" in target:
        module, _, name = target.partition(":")
        try:
            value = getattr(importlib.import_module(module), name, None)
        except ImportError:
            value = None  # select() below says so, and how to repair it
        if isinstance(value, type) and issubclass(value, Suite):
            return [value]
        role = next((role for role, base in ROLES.items() if isinstance(value, type) and issubclass(value, base)), None)
        return [suite_of(registry.select(role or "policy", target), options)]
    owned = [(role, name) for role, name, owner in registry.owners() if _normal(owner) == _normal(target)]
    return [suite_of(registry.select(role, name), options) for role, name in owned or registry.named(target)]


def check(
    suite: type[Suite],
    *,
    seed: int = 0,
    workloads: int = 20,
    cost_limit: float | None = 2.0,
    clock: Callable[[], float] = time.perf_counter,
    running: int = 256,
    watch: Watch = lambda place: None,
) -> Report:
    """Check one plugin; stops at the first violation.

    Args:
        suite: about which plugin, with which options.
        seed: of the fuzz.
        workloads: how many of them.
        cost_limit: most times that a step may cost with the plugin what it costs without; ``None``: not measured.
        clock: seconds, for the cost.
        running: requests that run while the cost is measured.
        watch: told what is tried next.
    """
    report = Report(suite().found(), seed)
    trying = _Trying(report, watch)
    try:
        with _quiet():
            _check(suite, report, trying, workloads, cost_limit, lambda plugins: measure(
                plugins, clock=clock, running=running))  # fmt: skip
    finally:
        suite.teardown_class()
    return report


@dataclass(frozen=True, slots=True)
class _Trying:
    """Tells whoever watches what is tried next."""

    report: Report
    watch: Watch

    def __call__(self, rule: str, where: str) -> None:
        found = self.report.found
        name = f"{found.role} {found.cls.name} ({f'{found.distribution} {found.version}'.strip()})"
        self.watch(Place(name, rule, where, self.report.seed))


def _check(
    suite: type[Suite],
    report: Report,
    trying: _Trying,
    workloads: int,
    cost_limit: float | None,
    cost: Callable[[Callable[[], Mapping[str, Any]]], Cost],
) -> None:
    for law in suite.laws():
        trying(law.rule, law.where)
        report.finding = _try(law)
        if report.finding is not None:
            return
        report.rules += 1
    if suite.role in FUZZED:
        _fuzz(suite(), report, trying, workloads)
    if report.finding is None and suite.role in FUZZED and cost_limit is not None:
        trying(COST_RULE.format(limit=cost_limit), "cost")
        report.cost = cost(lambda: suite().plugins(Situation()))
        if report.cost.ratio > cost_limit:
            report.finding = Finding(COST_RULE.format(limit=cost_limit), str(report.cost), "cost")
    if report.finding is None:
        trying("What a plugin is like is told beside the rules.", "notes")
        report.notes = suite().notes()


def _try(law: Law) -> Finding | None:
    try:
        law.check()
    except Exception as error:
        return Finding(law.rule, _words(error), law.where)
    return None


def _fuzz(suite: Suite, report: Report, trying: _Trying, workloads: int) -> None:
    for seed in range(report.seed, report.seed + workloads):
        rng = random.Random(seed)
        scheduler, kvcache = rng.choice(("unified", "radix")), rng.choice(("paged", "radix"))
        traits = [rng.random() < 0.5 for _ in range(4)]
        situation = Situation(scheduler, kvcache, rng.choice((1, 4)), *traits)
        where = f"fuzz[{situation}] --seed {seed} --workloads 1"
        trying(FUZZ_RULE, where)
        try:
            suite.workload(situation, seed, requests=40).run()
        except Exception as error:
            report.finding = Finding(FUZZ_RULE, _words(error), where)
            return
        report.workloads += 1


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


@contextmanager
def _quiet() -> Iterator[None]:
    """Steps fail on purpose here: the engine's log would say so each time."""
    logger = logging.getLogger("engine")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
