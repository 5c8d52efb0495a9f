"""Urgent requests before all others, and what the others wait for it."""

from __future__ import annotations

from dataclasses import replace

from _kit import GOODPUT, Case, Experiment, Make, Shown, Side, chosen
from _work import mixed

from engine.lab import SLO, Workload

LENGTHS = "prompt=lognormal:512:0.7:3000,output=exp:96:600"
BACKGROUND = 20  # priority; the urgent ones have 0
ASKED = {"urgent": SLO.parse("ttft=0.5,itl=0.25"), "background": SLO.parse("ttft=5")}
WIDTH = {"kvcache": "radix", "max_running": 64}


def _made(share: float, rate: float, requests: int, lengths: str = LENGTHS) -> Make:
    both = mixed(("urgent", lengths, rate * share), ("background", lengths, rate * (1 - share)), requests=requests)

    def make(seed: int, scale: float) -> Workload:
        return Workload(replace(one, priority=0 if one.tenant == "urgent" else BACKGROUND) for one in both(seed, scale))

    return make


def _side(name: str, **options: object) -> Side:
    return Side(name, {"scheduler": chosen("radix", **options)})


EXPERIMENT = Experiment(
    name="priority",
    title="Priority and starvation",
    question="Do urgent requests go before all others, preempting them (`priority`), also where those wait for ever; "
    "does whom 64 later ones have overtaken go first whatever it is (`priority, bounded`); or is everybody served in "
    "order of arrival (`fcfs`)? Scheduler and cache `radix`, at most 64 running.",
    known="Strict priority keeps the urgent class's latency through overload and starves the rest; aging bounds the "
    "wait (both old results of queueing; in LLM serving e.g. VTC, Sheng et al., OSDI 2024, on service guarantees).",
    x="requests/s",
    sides=(
        _side("fcfs"),
        _side("priority", enable_priority_scheduling=True),
        _side("priority, bounded", enable_priority_scheduling=True, bound_starvation=True),
    ),
    cases=[
        *(Case(workload="one in five is urgent", x=rate, make=_made(0.2, rate, 800), slo=ASKED, config=WIDTH)
          for rate in (40, 50, 65)),
        *(Case(workload="four in five are urgent", x=rate, make=_made(0.8, rate, 800), slo=ASKED, config=WIDTH)
          for rate in (40, 50, 65)),
    ],
    real=[
        Case(workload="real", x=3.0, make=_made(0.25, 3.0, 28, "prompt=32-96,output=8-32"),
             slo={"urgent": SLO.parse("ttft=2"), "background": SLO.parse("ttft=20")},
             config={"kvcache": "radix", "max_running": 4}),
    ],
    shown=(GOODPUT, Shown("urgent.goodput", "urgent alone", format=".2f"),
           Shown("background.goodput", "background alone", format=".2f"),
           Shown("urgent.ttft.p99", "urgent TTFT p99, s"), Shown("background.ttft.p50", "background TTFT p50, s"),
           Shown("background.queue.max", "longest wait, s"), Shown("preemptions", "preemptions", format=".0f"),
           Shown("recomputed", "recomputed tokens, thousands", 1e-3, ".1f")),
    panels=(GOODPUT, Shown("urgent.ttft.p99", "urgent TTFT p99, s"), Shown("background.queue.max", "longest wait, s")),
    workloads={
        "one in five is urgent": f"Poisson, {LENGTHS}; 800 requests; SLO of the urgent {ASKED['urgent']}, of the "
        f"others "
        f"{ASKED['background']}",
        "four in five are urgent": "the same, with four of five urgent",
        "real": "Poisson, 3 requests/s, a quarter of them urgent, prompt=32-96, output=8-32, at most 4 running",
    },
    reading="Strict priority keeps the urgent first token at a fraction of a second while fcfs has lost most of them, "
    "and costs the others what is said to be its price: their longest wait grows, to most of the run where "
    "four in five are urgent. While the urgent alone are less than the engine can do, that is the best "
    "goodput. It turns round where they are more: everything is then spent on urgent requests of which most "
    "are late anyway, hardly any of the others is answered in time, and the bounded side wins, at the highest "
    "rate by a third. The bound is not free. A request that has waited for too long goes first, and is "
    "preempted again by the next urgent one, since preemption does not look at the bound: of all sides this "
    "one preempts and recomputes most, which is why it is far behind strict priority at 50 requests/s. Where "
    "one in five is urgent the two decide nearly alike.",
)  # fmt: skip
