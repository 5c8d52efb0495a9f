"""What each policy is for, in one number: a simulated workload without and with it.

    python benchmarks/policies.py [--quick] [--policy NAME] [--seed 0]

The engine is real, the model is ``sim``, the clock is virtual: a step takes 10 ms and 0.05 ms a token that it computes.
Nothing is slept, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineCore, Outcome, Plan, Request, SamplingParams
from engine.core.registry import make
from engine.plugins.executors.sim import SimExecutor
from engine.testing import make_core

STEP, TOKEN = 0.010, 0.00005
EOS = 0


class Clock:
    """Seconds of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualSim(SimExecutor):
    """``sim`` on a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(SimExecutor.Options(max_model_len=16384, eos_id=EOS))
        self.clock = clock
        self.lengths: dict[str, int] = {}  # request -> tokens after which it stops by itself

    def execute(self, plan: Plan) -> Outcome:
        """The tokens of ``sim``, with end-of-sequence where the workload says; the clock moves on."""
        self.clock.now += STEP + TOKEN * plan.total_tokens
        outcome = super().execute(plan)
        outcome.tokens = [
            tokens and ((EOS,) if request.num_output + 1 >= self.lengths[request.id] else (tokens[0] or 1,))
            for request, tokens in zip(plan.requests, outcome.tokens, strict=True)
        ]
        return outcome


@dataclass
class Wish:
    """A request to come: when, its prompt, how long its output turns out."""

    at: float
    prompt: list[int]
    output: int
    metadata: dict[str, Any] = field(default_factory=dict)
    limit: int = 0  # max_tokens where it is more than the output: the engine cannot know how long that will be


@dataclass
class Result:
    """A run: its requests, with the time at which each ended."""

    core: EngineCore
    requests: list[Request]
    ended: dict[str, float]
    clock: Clock


def simulate(wishes: list[Wish], policy: str | None, *, options: dict[str, Any] | None = None, until: float = 1e9,
             **engine: Any) -> Result:  # fmt: skip
    """Run a workload to its end, or until a time, in which case what is left is aborted."""
    clock = Clock()
    chosen = [] if policy is None else [make("policy", policy, options or {})]
    for plugin in chosen:
        if hasattr(plugin, "clock"):
            plugin.clock = clock
    executor = VirtualSim(clock)
    core = make_core(executor=executor, policies=chosen, clock=clock, audit=False, max_waiting=100_000, **engine)
    pending = sorted(wishes, key=lambda wish: wish.at)[::-1]
    result = Result(core, [], {}, clock)
    while (pending or core.has_work) and clock.now < until:
        if not core.has_work:
            clock.now = max(clock.now, pending[-1].at)
        while pending and pending[-1].at <= clock.now:
            wish = pending.pop()
            params = SamplingParams(max_tokens=wish.limit or wish.output)
            request = core.add(wish.prompt, params, arrival=wish.at, metadata=wish.metadata)
            result.requests.append(request)
            executor.lengths[request.id] = wish.output
        for news in core.step():
            if news.finish is not None:
                result.ended[news.request_id] = clock.now
    assert core.hooks.faults() == [], core.hooks.faults()
    core.close()
    return result


def prefix(rng: random.Random, length: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(1, 40_000) for _ in range(length)]


def poisson(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Arrival times."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


# ---- one workload each; each yields (measure, figure) of one run


def fair_share(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Tenant a asks four times as often as b; for as long as both have work waiting, who is served how much?"""
    rng = random.Random(seed)
    seconds = 30 * scale
    wishes = [
        Wish(at, prefix(rng, rng.randrange(50, 150)), rng.randrange(40, 120), {"tenant": tenant})
        for tenant, rate in (("a", 32), ("b", 8))
        for at in poisson(rng, rate, seconds)
    ]
    done = simulate(wishes, policy, max_running=8, num_pages=400, page_size=16, until=seconds)
    served = {"a": 0, "b": 0}
    for request in done.requests:
        if request.num_output:
            served[request.metadata["tenant"]] += request.num_prompt + 2 * request.num_output
    return {"service of a / of b": served["a"] / served["b"]}


def deadlines(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Interactive requests (due in 3 s) among batch work (due in 60 s), somewhat more than the engine can do."""
    done = simulate(_mixed(seed, scale, rate=11.0), policy, max_running=8, num_pages=800, page_size=16)
    return {"deadlines met, %": 100 * _met(done)}


def early_reject(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """The same requests, in order of arrival: is time spent on those that will be late?"""
    done = simulate(_mixed(seed, scale, rate=11.0), policy, max_running=8, num_pages=800, page_size=16)
    return {"deadlines met, %": 100 * _met(done)}


def _mixed(seed: int, scale: float, rate: float) -> list[Wish]:
    rng = random.Random(seed)
    wishes = []
    for at in poisson(rng, rate, 60 * scale):
        urgent = rng.random() < 0.5
        due = 3.0 if urgent else 60.0 * scale
        output = rng.randrange(20, 60) if urgent else rng.randrange(60, 200)
        wishes.append(
            Wish(at, prefix(rng, rng.randrange(50, 200)), output, {"deadline_in": due, "predicted_tokens": output})
        )
    return wishes


def _met(done: Result) -> float:
    met = sum(
        request.finish != "error" and done.ended[request.id] <= request.arrival + request.metadata["deadline_in"]
        for request in done.requests
    )
    return met / len(done.requests)


def shortest_predicted(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Labels of a few tokens and essays of hundreds, told apart by tenant alone: the lengths are learned."""
    rng = random.Random(seed)
    wishes = []
    for at in poisson(rng, 11.0, 60 * scale):
        short = rng.random() < 0.7
        output = rng.randrange(4, 20) if short else rng.randrange(150, 350)
        wishes.append(Wish(at, prefix(rng, 100), output, {"tenant": "label" if short else "essay"}, limit=400))
    done = simulate(wishes, policy, max_running=8, num_pages=1000, page_size=16)
    return {"mean completion, s": statistics.mean(done.ended[r.id] - r.arrival for r in done.requests)}


def prefixes(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Twelve long system prompts, of which the cache holds four; requests come faster than they are served."""
    rng = random.Random(seed)
    heads = [prefix(rng, 640) for _ in range(12)]
    wishes = [
        Wish(at, rng.choice(heads) + prefix(rng, 20), rng.randrange(10, 30)) for at in poisson(rng, 20.0, 15 * scale)
    ]
    done = simulate(wishes, policy, max_running=4, num_pages=240, page_size=16, max_batch_tokens=1024)
    return {
        "cached, % of prompts": _cached(done),
        "worst wait, s": max(done.ended[request.id] - request.arrival for request in done.requests),
    }


def fair_prefixes(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Two tenants with three system prompts each, one asking four times as often; the cache holds two or three."""
    rng = random.Random(seed)
    heads = {tenant: [prefix(rng, 480) for _ in range(3)] for tenant in "ab"}
    seconds = 30 * scale
    wishes = [
        Wish(at, rng.choice(heads[tenant]) + prefix(rng, 20), rng.randrange(20, 60), {"tenant": tenant})
        for tenant, rate in (("a", 32.0), ("b", 10.0))
        for at in poisson(rng, rate, seconds)
    ]
    done = simulate(wishes, policy, max_running=4, num_pages=140, page_size=16, max_batch_tokens=1024, until=seconds)
    started = [request for request in done.requests if request.num_output]
    served = dict.fromkeys("ab", 0)
    for request in started:
        served[request.metadata["tenant"]] += request.num_prompt - request.cached_tokens + 2 * request.num_output
    cached = 100 * sum(r.cached_tokens for r in started) / sum(r.num_prompt for r in started)
    return {"service of a / of b": served["a"] / served["b"], "cached, % of prompts": cached}


def memory(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Short prompts whose outputs grow long: a pool that holds them all at first, and not later."""
    rng = random.Random(seed)
    wishes = [
        Wish(at, prefix(rng, rng.randrange(30, 60)), int(min(500, rng.lognormvariate(5, 0.7))), limit=500)
        for at in poisson(rng, 6.0, 90 * scale)
    ]
    done = simulate(
        wishes, policy, max_running=64, num_pages=220, page_size=16, kvcache_options={"enable_prefix_caching": False}
    )
    counters = done.core.counters
    return {"preemptions": counters.preemptions, "recomputed tokens": counters.recomputed_tokens}


def victims(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Long documents and short chats share a pool that is too small."""
    rng = random.Random(seed)
    wishes = []
    for at in poisson(rng, 5.0, 60 * scale):
        long = rng.random() < 0.3
        wishes.append(
            Wish(at, prefix(rng, rng.randrange(400, 900) if long else rng.randrange(20, 60)), rng.randrange(60, 300))
        )
    done = simulate(
        wishes, policy, max_running=64, num_pages=300, page_size=16, kvcache_options={"enable_prefix_caching": False}
    )
    counters = done.core.counters
    return {"recomputed tokens": counters.recomputed_tokens, "preemptions": counters.preemptions}


def cycles(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Ten documents asked about in turn, over and over; the cache holds eight."""
    rng = random.Random(seed)
    documents = [prefix(rng, 320) for _ in range(10)]
    wishes = [Wish(0.5 * n, documents[n % 10] + prefix(rng, 10), 4) for n in range(int(400 * scale))]
    done = simulate(wishes, policy, kvcache="radix", max_running=4, num_pages=170, page_size=16, max_batch_tokens=1024)
    return {"cached, % of prompts": _cached(done)}


def categories(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """Chats come back after a while with the same history; one-off queries never do, and are three times as many."""
    rng = random.Random(seed)
    wishes, number = [], 0
    chats = [prefix(rng, 200) for _ in range(12)]
    for at in poisson(rng, 4.0, 200 * scale):
        if rng.random() < 0.25:
            number += 1
            wishes.append(Wish(at, chats[number % 12] + prefix(rng, 16), 8, {"category": "chat"}))
        else:
            wishes.append(Wish(at, prefix(rng, rng.randrange(100, 300)), 8, {"category": "query"}))
    done = simulate(wishes, policy, kvcache="radix", max_running=4, num_pages=300, page_size=16, max_batch_tokens=1024)
    return {"cached, % of chats": _cached(done, lambda request: request.metadata["category"] == "chat")}


def retention(policy: str | None, seed: int, scale: float) -> dict[str, float]:
    """A system prompt that somebody pays for, used each 20 s; between its uses a flood of one-off prompts."""
    rng = random.Random(seed)
    head = prefix(rng, 800)
    wishes = [Wish(at, prefix(rng, rng.randrange(100, 300)), 8) for at in poisson(rng, 4.0, 300 * scale)]
    for n in range(max(3, int(15 * scale))):
        wishes.append(Wish(20.0 * n, head + prefix(rng, 16), 8, {"retain": 1, "retain_ttl": 60.0}))
    done = simulate(wishes, policy, max_running=4, num_pages=300, page_size=16, max_batch_tokens=1024)
    return {"cached, % of the marked": _cached(done, lambda request: "retain" in request.metadata)}


def _cached(done: Result, which: Callable[[Request], bool] = lambda request: True) -> float:
    chosen = [request for request in done.requests if which(request)]
    return 100 * sum(request.cached_tokens for request in chosen) / sum(request.num_prompt for request in chosen)


WORKLOADS: dict[str, Callable[[str | None, int, float], dict[str, float]]] = {
    "fair-share": fair_share,
    "deadline": deadlines,
    "shortest-predicted": shortest_predicted,
    "k-lpm": prefixes,
    "past-future": memory,
    "early-reject": early_reject,
    "random-leaf": cycles,
    "reuse-forecast": categories,
    "soft-retention": retention,
    "least-recompute": victims,
    "dlpm": fair_prefixes,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of each workload: does it run?")
    parser.add_argument("--policy", choices=WORKLOADS, help="this one only")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scale = 0.1 if arguments.quick else 1.0
    print(f"{'policy':<20}{'measure':<26}{'without':>10}{'with':>10}")
    for name, workload in WORKLOADS.items():
        if arguments.policy in (None, name):
            without, with_it = (workload(policy, arguments.seed, scale) for policy in (None, name))
            for measure, figure in without.items():
                print(f"{name:<20}{measure:<26}{figure:>10.1f}{with_it[measure]:>10.1f}")


if __name__ == "__main__":
    main()
