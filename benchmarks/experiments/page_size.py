"""Tokens a page: what of a shared beginning is found again."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side
from _work import families

from engine.lab import SLO

ASKED = SLO.parse("ttft=0.2")


def _side(size: int) -> Side:
    return Side(f"page of {size}", {"page_size": size})


def _case(name: str, rate: float, shared: int, own: int, pool: int, groups: int = 50) -> Case:
    make = families(rate=rate, requests=1500, groups=groups, shared=shared, own=str(own), output="exp:16:100")
    config = {"scheduler": "radix", "kvcache": "radix", "max_running": 256, "kv_tokens": pool}
    return Case(workload=name, x=rate, make=make, slo=ASKED, config=config)


EXPERIMENT = Experiment(
    name="page_size",
    title="Page size: 1, 16 and 64 tokens",
    question="How many tokens has a page? Whole pages alone are shared, and the last page of a request is partly "
    "empty. Scheduler and cache `radix`, a pool of as many tokens on all sides. What a page size costs a kernel is "
    "not simulated: the device takes as long for all of them. What it costs the host is measured, and not part of the "
    "simulated time.",
    known="SGLang shares token by token (pages of 1), vLLM by blocks of 16: less is found again, and the index is "
    "smaller.",
    x="requests/s",
    sides=(_side(16), _side(1), _side(64)),
    cases=[
        *(_case("beginnings of 30", rate, 30, 20, 64_000) for rate in (300, 450, 600)),
        *(_case("beginnings of 1000", rate, 1000, 100, 80_000) for rate in (120, 150, 170)),
        *(_case("little memory, nothing shared", rate, 1, 20, 3200, 10**5) for rate in (150, 250, 350)),
    ],
    real=[
        Case(workload="real", x=3, slo=SLO.parse("ttft=4"),
             make=families(rate=3.0, requests=40, groups=3, shared=30, own="20", output="8"),
             config={"scheduler": "radix", "kvcache": "radix", "max_running": 8}),
    ],
    real_sides=("page of 1", "page of 16"),
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"),
           Shown("hit_tokens", "hit tokens, thousands", 1e-3, ".1f"),
           Shown("cached", "of prompts, %", 100, ".1f"), Shown("ttft.mean", "TTFT mean, ms", 1e3),
           Shown("ttft.p99", "TTFT p99, ms", 1e3), Shown("plan_us", "planning, µs CPU a step", format=".0f")),
    panels=(GOODPUT, Shown("cached", "prompt tokens from cache, %", 100), Shown("plan_us", "planning, µs CPU a step")),
    workloads={
        "beginnings of 30": "Poisson, 50 families (Zipf) with a beginning of 30 tokens each, own 20 tokens, "
        f"output=exp:16:100, a pool of 64,000 tokens; 1500 requests; SLO {ASKED}",
        "beginnings of 1000": "the same with beginnings of 1000, own 100 tokens, a pool of 80,000 tokens",
        "little memory, nothing shared": "the same with 21 tokens that nobody shares, a pool of 3200 tokens",
        "real": "Poisson, 3 requests/s of three families, beginnings of 30 tokens, own 20, output=8",
    },
    reading="Pages of 1 find all of a common beginning, pages of 16 on average all but half a page, pages of 64 "
    "nothing of one of 30 tokens. That is worth something only near saturation, where hits decide whether a "
    "queue builds up. With little memory the tail of the last page counts more than sharing: a request of 37 "
    "tokens takes 37, 48, or 64 of the pool. No side that wins is beaten elsewhere, since what large pages "
    "are for is not in this cost: kernels that read whole pages, and shorter tables. What is measured of the "
    "host (CPU time of planning) is higher with pages of 1 in every case, by up to two thirds. On a device "
    "the difference between 1 and 16 is a question of the kernel.",
    cpu=True,
)  # fmt: skip
