"""Running requests first, or new prompts first, on the same arrivals."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side
from _work import spelled

from engine.lab import SLO

CHAT = "prompt=lognormal:512:1:4000,output=exp:128:1000"
LABEL = "prompt=lognormal:1500:0.5:4000,output=4"
PAPERS = "prompt=lognormal:4000:0.5:7000,output=exp:150:600"
SOON = SLO.parse("ttft=0.5")
BOTH = SLO.parse("ttft=1,itl=0.06")
FIRST = SLO.parse("ttft=0.3,itl=0.5")
WIDTH = {"max_running": 256, "max_batch_tokens": 2048}

EXPERIMENT = Experiment(
    name="phases",
    title="Running first against prefill first",
    question="Does a step pay those that run first and give prompts what is left (`unified`), or are prompts computed "
    "first, in batches of their own, while those that run wait (`radix`)? Cache `paged` on both sides, 2048 tokens a "
    "step, at most 256 running, a pool that is never short.",
    known="Sarathi-Serve (OSDI 2024): prefill-first schedules give the best TTFT and stall decodes; stall-free batches "
    "hold the gaps between tokens.",
    x="requests/s",
    sides=(Side("running first", {"scheduler": "unified"}), Side("prefill first", {"scheduler": "radix"})),
    cases=[
        *(Case(workload="chat", x=rate, make=spelled(f"poisson:rate={rate},{CHAT}", 700), slo=BOTH, config=WIDTH)
          for rate in (5, 15, 25, 35)),
        *(Case(workload="documents", x=rate, make=spelled(f"poisson:rate={rate},{PAPERS}", 400), slo=SOON, config=WIDTH)
          for rate in (5, 7)),
        *(Case(workload="labels", x=rate, make=spelled(f"poisson:rate={rate},{LABEL}", 1000), slo=FIRST, config=WIDTH)
          for rate in (14, 18, 22)),
    ],
    real=[
        Case(workload="real", x=1.2, make=spelled("poisson:rate=1.2,prompt=64-256,output=8-48", 24),
             slo=SLO.parse("ttft=3,itl=0.5"), config={"max_running": 16, "max_batch_tokens": 256}),
    ],
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"), Shown("ttft.mean", "TTFT mean, s"),
           Shown("ttft.p99", "TTFT p99, s"), Shown("itl.p99", "ITL p99, ms", 1e3),
           Shown("stall.p99", "stall p99, ms", 1e3),
           Shown("rows", "rows a step", format=".1f")),
    panels=(GOODPUT, Shown("ttft.p99", "TTFT p99, s"), Shown("itl.p99", "ITL p99, ms", 1e3)),
    workloads={
        "chat": f"Poisson, {CHAT}; 700 requests; SLO {BOTH}",
        "documents": f"Poisson, {PAPERS}; 400 requests; SLO {SOON}",
        "labels": f"Poisson, {LABEL}; 1000 requests; SLO {FIRST}",
        "real": "Poisson, 1.2 requests/s, prompt=64-256, output=8-48, 256 tokens a step",
    },
    reading="Running first holds the gap between tokens to one step; prefill first lets prompts that keep coming "
    "stall all streams for several steps in a row, the longer the more of them come. What it should win by "
    "that, time to the first token, is little here: decoding rows ride along in a step that computes prompts "
    "at nearly no cost (they need memory, the prompt needs products), so that running first delays a prompt "
    "by a few percent only. It is visible where contexts are long, reading their KV takes a good part of a "
    "step, and the SLO asks for the first token alone (documents, at the highest rate): there prefill first "
    "wins. That is less than the literature gives it, for two reasons that are both in the model: the "
    "roofline lets products and reads of a step's linear layers overlap fully, and nothing is short of "
    "memory.",
)  # fmt: skip
