"""One simulated engine: a real core on a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.assemble import assemble
from engine.core.config import EngineConfig, Selection
from engine.core.errors import ConfigError
from engine.core.plan import Delta
from engine.core.registry import Registry
from engine.core.request import Request, SamplingParams
from engine.lab.clock import SimulatedClock
from engine.lab.cost import CostModel
from engine.lab.executor import WHERE, ModelledExecutor
from engine.lab.handoff import Links, ModelledHandoff

HANDOFF = "engine.lab.handoff:ModelledHandoff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines, all alike.

    Args:
        replicas: engines that answer.
        prefill: engines that compute prompts and hand them over; 0: those that answer do it themselves.
        router: who gets a request, on either side; see ``engine.lab.routers``.
        link_gbps: gigabits a second that an engine sends KV with, and receives it with.
        link_ms: latency of a transfer.
    """

    replicas: int = 1
    prefill: int = 0
    router: str = "round-robin"
    link_gbps: float = 200.0
    link_ms: float = 1.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.prefill < 0:
            raise ConfigError(f"a fleet of {self.replicas} engines and {self.prefill} for prompts")
        if not (self.link_gbps > 0 and self.link_ms >= 0):
            raise ConfigError(f"a link of {self.link_gbps:g} Gbit/s and {self.link_ms:g} ms")


class Used(NamedTuple):
    """What an engine did: ``busy`` and ``seconds`` of the device and in all, tokens computed, rows of a step in the
    mean (``None``: it does not tell), pages in its pool, and counters of its core."""

    engine: str
    seconds: float
    busy: float
    steps: int
    tokens: int
    rows_a_step: float | None
    pages: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    evicted_pages: int
    failed_steps: int


@dataclass(slots=True, eq=False)
class Replica:
    """An engine of the fleet.

    Attributes:
        number: among those of its kind, from 0.
        news: of the step that ends at ``clock.now``, not yet told.
        due: a turn of it is planned.
    """

    name: str
    number: int
    core: Any  # an EngineCore; looked at for every step
    clock: SimulatedClock
    executor: ModelledExecutor
    news: Sequence[Delta] = ()
    due: bool = False

    def add(self, name: str, tokens: Sequence[int], params: SamplingParams, now: float, **more: Any) -> Request:
        """Give it a request. Mutates. Raises ``InvalidRequest`` and ``QueueFull``."""
        if not self.due and self.clock.now < now:
            self.clock.now = now
        request: Request = self.core.add(tokens, params, request_id=name, **more)
        return request

    def step(self, now: float) -> float:
        """One step that begins now; returns when it ends. Its news are in ``news``. Mutates.

        A step that brings nothing is followed by a rest, as in a server.
        """
        core, clock = self.core, self.clock
        if clock.now < now:
            clock.now = now
        self.news = core.step()
        if clock.now == now and not self.news and not core.last_plan:
            clock.sleep(core.rest)
        return clock.now

    def used(self) -> Used:
        """What it did so far."""
        core, (tokens, rows) = self.core, self.executor.work
        counters = asdict(core.counters)
        names = ("cached_tokens", "recomputed_tokens", "preemptions", "evicted_pages", "failed_steps")
        steps = counters["steps"]
        return Used(
            self.name, self.clock.now, self.executor.busy, steps, tokens, rows / steps if steps else 0.0,
            core.pool.num_pages, **{name: counters[name] for name in names},
        )  # fmt: skip


def replica(
    config: EngineConfig, name: str, number: int, *, cost: CostModel | None, links: Links | None, registry: Registry
) -> Replica:
    """Build one. All that is chosen stays, but for the executor; with ``record_dir`` each engine's decision log is in a
    folder of its own there. Policies are not timed: they are fast or slow on this machine, not on the simulated one.

    Args:
        config: ``executor`` may bring options of ``ModelledExecutor``.
        cost: instead of what the options say.
        links: it receives KV over these.

    Raises:
        ConfigError, ModelError, PluginError: as ``assemble``; or a connector is selected: its time is not modelled.
    """
    if config.connectors:
        raise ConfigError("connectors move real bytes in real time: they cannot be simulated")
    handoff = () if links is None else (Selection(name=HANDOFF, options={"engine": name}),)
    folder = None if config.record_dir is None else str(Path(config.record_dir) / name)
    changed = {"executor": modelled(config), "connectors": handoff, "ask_seconds": float("inf"), "cache_events": "off",
               "record_dir": folder}  # fmt: skip
    clock = SimulatedClock()
    core = assemble(config.model_copy(update=changed), registry, clock=clock, sleep=clock.sleep)
    executor = core.executor
    assert isinstance(executor, ModelledExecutor)
    executor.simulated = clock
    if cost is not None:
        executor.cost = cost
    for connector in core.exchange.connectors:
        assert isinstance(connector, ModelledHandoff)
        assert links is not None
        connector.links = links
    return Replica(name, number, core, clock, executor)


def modelled(config: EngineConfig) -> Selection:
    """The executor of a simulation: the one selected if it is modelled, else the default one."""
    chosen = config.executor
    return chosen if chosen.name == WHERE else Selection(name=WHERE)
