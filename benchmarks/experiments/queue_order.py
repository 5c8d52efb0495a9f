"""The order of the queue: as they came, longest cached prefix first, or the cache's tree depth first."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side, chosen
from _work import families

from engine.lab import SLO

ASKED = SLO.parse("ttft=1")
POOL = {"kvcache": "radix", "num_pages": 5000, "max_running": 32}


LATE = SLO.parse("ttft=4")


def _case(name: str, rate: float, shared: int, own: str, slo: SLO = ASKED) -> Case:
    make = families(rate=rate, requests=700, groups=64, shared=shared, own=own, output="exp:32:200", skew=0.8)
    return Case(workload=name, x=rate, make=make, slo=slo, config=POOL)


EXPERIMENT = Experiment(
    name="queue_order",
    title="Queue order: fcfs, lpm, dfs-weight",
    question="Who of the queue is tried first (`scheduler.policy` of `radix`): who came first, who has the longest "
    "cached prefix, or who is next in the cache's tree? Cache `radix`, a pool of 80,000 tokens, at most 32 running. "
    "Requests belong to 64 families with a prompt's beginning each, the n-th asked for as often as 1/n^0.8.",
    known="SGLang (Zheng et al., NeurIPS 2024): longest shared prefix first raises the hit rate, near the optimum of a "
    "depth-first order. k-LPM (Dexter et al. 2025): it starves whom nobody resembles.",
    x="requests/s",
    sides=[Side(name, {"scheduler": chosen("radix", policy=name)}) for name in ("fcfs", "lpm", "dfs-weight")],
    cases=[
        *(_case("high sharing", rate, 2000, "lognormal:100:0.5:400") for rate in (30, 40, 60)),
        *(_case("low sharing", rate, 100, "lognormal:1000:0.5:4000") for rate in (30, 40)),
        *(_case("low sharing, patient", rate, 100, "lognormal:1000:0.5:4000", LATE) for rate in (36, 40)),
    ],
    real=[
        Case(workload="real", x=6.0, slo=SLO.parse("ttft=4"),
             make=families(rate=6.0, requests=40, groups=6, shared=192, own="16", output="8", skew=0.5),
             config={"kvcache": "radix", "num_pages": 60, "max_running": 3}),
    ],
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"),
           Shown("hit_tokens", "hit tokens, thousands", 1e-3),
           Shown("cached", "of prompts, %", 100, ".1f"), Shown("ttft.mean", "TTFT mean, s"),
           Shown("ttft.p99", "TTFT p99, s"), Shown("queue.max", "longest wait, s"),
           Shown("fairness", "fairness (Jain)", format=".2f"),
           Shown("plan_us", "planning, µs CPU a step", format=".0f")),
    panels=(GOODPUT, Shown("cached", "prompt tokens from cache, %", 100), Shown("fairness", "fairness (Jain)")),
    workloads={
        "high sharing": f"Poisson; beginnings of 2000 tokens, own lognormal:100:0.5:400, output=exp:32:200; 700 "
        f"requests; SLO {ASKED}",
        "low sharing, patient": f"the same as low sharing; SLO {LATE}",
        "low sharing": f"Poisson; beginnings of 100 tokens, own lognormal:1000:0.5:4000, output=exp:32:200; 700 "
        f"requests; SLO {ASKED}",
        "real": "Poisson, 6 requests/s of six families, beginnings of 192 tokens, own 16, output=8, a pool of 960 "
        "tokens, at most 3 running",
    },
    reading="With high sharing, lpm and dfs-weight raise the hit rate once a queue builds up, which takes load off "
    "the device: they carry rates at which fcfs has lost nearly everybody. With low sharing there is nothing "
    "to hit, and still they keep more requests within one second at the highest rate. That is not the cache's "
    "merit: an order that is unfair lets some be in time while others wait for longer than anybody does with "
    "fcfs, and goodput counts the former. It turns round as soon as a fair queue is still within the limit: "
    "at 30 requests/s, and with an SLO of four seconds, fcfs wins over both. Starvation is in the longest "
    "wait and in Jain's index of the families' mean TTFT. lpm falls back to fcfs while more than 128 wait; "
    "dfs-weight does not, and is no better here. Planning costs more CPU time with either, the more the "
    "longer the queue: about twice as much at the highest rates.",
    cpu=True,
)  # fmt: skip
