"""One thing to measure, as plain values that can travel to a process of its own, and how it is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.serve.client import AsyncEngine
from engine.core.serve.transport import plain_config
from engine.lab.arrivals import Workload, seed_of, together
from engine.lab.cost import load_fitted
from engine.lab.driving import Progress, drive, warm
from engine.lab.endpoint import Endpoint, EndpointTarget
from engine.lab.inside import measure
from engine.lab.measured import SLO
from engine.lab.replica import Fleet
from engine.lab.results import Results
from engine.lab.searching import Found, Probe, Search, find_rate
from engine.lab.simulation import Simulation
from engine.lab.spelled import Source, source

DEFAULT_WORKLOAD = "poisson:rate=1,requests=100,prompt=256,output=64"
Run = Callable[[Workload], Results]


class Job(BaseModel):
    """What is measured: an engine of ours inside, one that is simulated, or a server.

    Attributes:
        kind: which of them.
        config: fields of ``EngineConfig``; selections as ``name`` and their options.
        fleet, cost: of a simulation: fields of ``Fleet``, and a file of ``Fitted``.
        endpoint: arguments of ``Endpoint.find``, the tokenizer by name.
        in_process: the engine is a thread of the client.
        workloads: as text; all at once.
        rate: requests a second instead of theirs; ``None``: theirs.
        requests: how many instead of theirs.
        warm_up: requests beforehand that are not counted.
        timeout: seconds after which a request is given up.
        search: arguments of ``Search``; ``None``: one run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["engine", "simulated", "endpoint"] = "engine"
    config: dict[str, Any] = Field(default_factory=dict)
    fleet: dict[str, Any] = Field(default_factory=dict)
    cost: str | None = None
    endpoint: dict[str, Any] = Field(default_factory=dict)
    in_process: bool = False
    workloads: tuple[str, ...] = (DEFAULT_WORKLOAD,)
    seed: int = 0
    rate: float | None = None
    requests: int | None = None
    slo: str = ""
    warm_up: int = 0
    timeout: float = 600.0
    search: dict[str, Any] | None = None

    def limits(self) -> SLO:
        """The SLO."""
        return SLO.parse(self.slo) if self.slo else SLO()

    def workload(self, rate: float | None = None, salt: object = None) -> Workload:
        """What arrives. Raises ``ConfigError``.

        Args:
            rate: instead of the job's.
            salt: other tokens of the same lengths at the same times; ``None``: those of the seed.
        """
        made = [_sized(source(text), self.requests) for text in self.workloads]
        all_of_them = together([one.make(self.seed) for one in made])
        wanted = self.rate if rate is None else rate
        if wanted is not None:
            all_of_them = all_of_them.faster(wanted / _rate(made, all_of_them))
        return all_of_them if salt is None else reseeded(all_of_them, salt)


def plain(config: EngineConfig) -> dict[str, Any]:
    """A configuration as plain values that make the same, secrets left out. Raises ``ConfigError``."""
    return {name: value for name, value in plain_config(config).items() if name != "api_key"}


def reseeded(workload: Workload, salt: object) -> Workload:
    """The same lengths, times and common beginnings, of other tokens: no cache knows them."""
    each = []
    for one in workload:
        each.append(replace(one, prompt=tuple(p._replace(seed=seed_of(salt, p.seed)) for p in one.prompt)))
    return Workload(each, workload.name)


def _sized(one: Source, requests: int | None) -> Source:
    """With another number of requests."""
    if requests is None:
        return one
    name = next((name for name in ("requests", "limit") if name in type(one).model_fields), None)
    if name is None:
        raise ConfigError(f"workload {one.spelled()!r}: how many requests there are is not set by --num-requests")
    fields = {key: getattr(one, key) for key in one.model_fields_set if key != "duration"}
    return type(one)(**{**fields, name: requests})


def _rate(made: Sequence[Source], workload: Workload) -> float:
    """Requests, or conversations, that come a second: as was written, or as they come."""
    written: list[float | None] = [getattr(one, "rate", None) for one in made]
    if None not in written:
        return sum(rate for rate in written if rate is not None)
    times = [one.at for one in workload if not one.after]
    span = times[-1] - times[0] if times else 0.0
    if span <= 0:
        raise ConfigError(f"workload {workload.name!r}: all come at once, at no rate that could be another")
    return (len(times) - 1) / span


def run(
    job: Job, *, progress: Progress | None = None, tell: Callable[[Probe], None] = lambda probe: None
) -> Results | Found:
    """Measure it: once, or in a search.

    Raises:
        ConfigError, PluginError, ModelError: before anything was measured.
        EngineError: the engine or the client could not go on.
    """
    limits = job.limits()
    workload = job.workload()
    search = None if job.search is None else Search(**job.search)
    if search is not None and not limits.limits:
        raise ConfigError("a search needs limits to meet: give --slo, e.g. ttft=1.0,itl=0.1")
    with _runner(job, workload, progress) as once:
        if search is None:
            return once(workload)
        return find_rate(lambda rate: once(job.workload(rate, salt=("probe", rate))), limits, search, tell)


@contextmanager
def _runner(job: Job, workload: Workload, progress: Progress | None) -> Iterator[Run]:
    """What runs workloads. The first is preceded by a warm-up."""
    config = EngineConfig.model_validate(job.config)
    if job.kind == "simulated":
        cost, fleet = None if job.cost is None else load_fitted(Path(job.cost)), Fleet(**job.fleet)
        yield lambda one: Simulation(config, one, fleet, cost=cost, progress=progress).run()
        return
    left = [job.warm_up]  # requests of the warm-up that is still to come
    if job.kind == "endpoint":
        endpoint = found_endpoint(job.endpoint, job.timeout)
        endpoint.check(workload)
        yield lambda one: asyncio.run(_ask(endpoint, one, _taken(left), progress))
        return
    engine = AsyncEngine.launch(config, in_process=job.in_process)
    try:
        yield lambda one: measure(engine, one, warm_up=_taken(left), timeout=job.timeout, progress=progress)
    finally:
        engine.shutdown()


def _taken(left: list[int]) -> int:
    count, left[0] = left[0], 0
    return count


def found_endpoint(given: Mapping[str, Any], timeout: float) -> Endpoint:
    """The server. Raises as ``Endpoint.find``, and ``ModelError`` where its tokenizer cannot be read."""
    tokenizer, fields = given.get("tokenizer"), {key: value for key, value in given.items() if key != "tokenizer"}
    if tokenizer is not None:
        from engine.core.models.source import resolve
        from engine.core.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve(tokenizer))
    return Endpoint.find(**fields, tokenizer=tokenizer, timeout=timeout)


async def _ask(endpoint: Endpoint, workload: Workload, warm_up: int, progress: Progress | None) -> Results:
    async with EndpointTarget(endpoint) as target:
        await warm(target, workload, warm_up)
        driven = await drive(target, workload, progress=progress)
    return Results(
        workload=workload.name, requests=driven.requests, gaps=driven.gaps, seconds=driven.seconds, engines=(),
        wall=driven.wall, cpu=driven.cpu, about={"endpoint": endpoint.describe()}, client=driven.client,
    )  # fmt: skip
