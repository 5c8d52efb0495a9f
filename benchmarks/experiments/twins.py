"""The same prompt several times at once: who computes it, and who waits for it."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side, chosen
from _work import bursts_of_copies

from engine.lab import SLO

ASKED = SLO.parse("ttft=0.4")
SOON = SLO.parse("ttft=0.05")
COPIES = (1, 2, 4, 8, 16)


def _case(name: str, copies: int, prompt: str, own: int, rate: float, slo: SLO) -> Case:
    make = bursts_of_copies(rate=rate, requests=800, copies=copies, prompt=prompt, own=own, output="exp:32:200")
    return Case(workload=name, x=copies, make=make, slo=slo, config={"max_running": 256})


EXPERIMENT = Experiment(
    name="twins",
    title="The same prompt several times in one step",
    question="Several requests with one prompt come at the same moment, and nothing of it is cached. `paged` content "
    "can be found as soon as it is planned, so that twins share within a step; the `radix` cache has it when the "
    "prompt is computed: in order of arrival each twin computes its own, with `lpm` the first computes and its "
    "siblings are postponed.",
    known="vLLM registers blocks when they are scheduled; SGLang inserts what is computed, and holds siblings of the "
    "waiting queue back (in-batch prefix caching).",
    x="copies",
    sides=(
        Side("radix, fcfs", {"scheduler": chosen("radix", policy="fcfs"), "kvcache": "radix"}),
        Side("radix, lpm", {"scheduler": chosen("radix", policy="lpm"), "kvcache": "radix"}),
        Side("unified, paged", {"scheduler": "unified", "kvcache": "paged"}),
    ),
    cases=[
        *(_case("long prompts", copies, "lognormal:2000:0.5:6000", 16, 20.0, ASKED) for copies in COPIES),
        *(_case("short prompts", copies, "100-200", 16, 200.0, SOON) for copies in COPIES),
    ],
    real=[
        Case(workload="real", x=4, slo=SLO.parse("ttft=3"), config={"max_running": 16},
             make=bursts_of_copies(rate=2.0, requests=32, copies=4, prompt="200", own=8, output="8")),
    ],
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"),
           Shown("cached", "prompt tokens from cache, %", 100, ".1f"),
           Shown("ttft.mean", "TTFT mean, ms", 1e3), Shown("ttft.p99", "TTFT p99, ms", 1e3),
           Shown("itl.p99", "ITL p99, ms", 1e3)),
    panels=(GOODPUT, Shown("cached", "prompt tokens from cache, %", 100), Shown("ttft.mean", "TTFT mean, ms", 1e3)),
    workloads={
        "long prompts": f"bursts, 20 requests/s, prompt=lognormal:2000:0.5:6000 and 16 own, output=exp:32:200; 800 "
        f"requests; SLO {ASKED}",
        "short prompts": f"bursts, 200 requests/s, prompt=100-200 and 16 own, output=exp:32:200; 800 requests; SLO "
        f"{SOON}",
        "real": "bursts of four, 2 requests/s, prompts of 200 tokens and 8 own, output=8",
    },
    reading="In the paged design the first twin publishes its pages as it is planned, and the others of the same step "
    "read them: a prompt is computed once however many come. In the radix design twins that fit into one "
    "prefill batch are all computed, with fcfs always. lpm sorts the siblings of the first behind everybody, "
    "which helps only as far as others fill the batch before them: where there is room they join the same "
    "batch all the same, and share nothing. So it is in SGLang, whose decisions the scheduler repeats. What "
    "is found in either radix case is found by twins that came too late for the first batch. With one copy "
    "the designs differ by their phases alone. No workload was found on which sharing within a step loses: it "
    "has no price here (in the engine it has one: a twin cannot be preempted in the step in which another has "
    "adopted its fresh pages).",
)  # fmt: skip
