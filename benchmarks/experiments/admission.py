"""Who is let in while memory is short, and what that costs in tokens computed twice."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side, chosen, device
from _work import spelled

from engine.lab import SLO

ASKED = SLO.parse("ttft=5,stall=1")
PATIENT = SLO.parse("ttft=40,stall=0.5")
POOL = {"max_running": 512, "max_batch_tokens": 512, **device(gpu="a10")}
GROW = "prompt=50,output=exp:400:2000,max-tokens=2000"
STAY = "prompt=lognormal:1500:0.5:4000,output=exp:200:1000,max-tokens=1000"

EXPERIMENT = Experiment(
    name="admission",
    title="Admission pressure against recomputed tokens",
    question="What holds admission back while the pool is short: nothing but that a prompt fits (`eager`), a share of "
    "the pool that is kept free (`scheduler.watermark` of `unified`), or a forecast from the lengths of past answers "
    "(policy `past-future`)? Scheduler `unified`, cache `paged`; the device is an A10, whose memory holds KV of about "
    "42,000 tokens beside the weights.",
    known="Past-Future (Gong et al., ASPLOS 2025): eager admission evicts and recomputes under load, conservative "
    "admission queues; a forecast comes near the optimum.",
    x="requests/s",
    sides=(
        Side("eager", {"scheduler": "unified", "policies": []}),
        Side("watermark 20 %", {"scheduler": chosen("unified", watermark=0.2), "policies": []}),
        Side("past-future", {"scheduler": "unified", "policies": ["past-future"]}),
    ),
    cases=[
        *(Case(workload="answers that grow", x=rate, make=spelled(f"poisson:rate={rate},{GROW}", 500), slo=ASKED,
               config=POOL) for rate in (4, 7)),
        *(Case(workload="answers that grow, patient readers", x=rate, make=spelled(f"poisson:rate={rate},{GROW}", 500),
               slo=PATIENT, config=POOL) for rate in (4, 7)),
        *(Case(workload="prompts far longer than answers", x=rate, make=spelled(f"poisson:rate={rate},{STAY}", 300),
               slo=ASKED, config=POOL) for rate in (1, 1.5, 2)),
    ],
    real=[
        Case(workload="real", x=4.0, make=spelled("poisson:rate=4,prompt=16-32,output=32-96", 24),
             slo=SLO.parse("ttft=20,itl=2"), config={"num_pages": 56, "max_running": 32}),
    ],
    real_sides=("eager", "watermark 20 %"),
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"), Shown("preemptions", "preemptions", format=".0f"),
           Shown("recomputed", "recomputed tokens, thousands", 1e-3, ".1f"), Shown("rows", "rows a step", format=".1f"),
           Shown("ttft.p99", "TTFT p99, s"), Shown("stall.p99", "stall p99, s")),
    panels=(GOODPUT, Shown("recomputed", "recomputed tokens, thousands", 1e-3), Shown("ttft.p99", "TTFT p99, s")),
    workloads={
        "answers that grow": f"Poisson, {GROW}; 500 requests; SLO {ASKED}",
        "answers that grow, patient readers": f"the same; SLO {PATIENT}",
        "prompts far longer than answers": f"Poisson, {STAY}; 300 requests; SLO {ASKED}",
        "real": "Poisson, 4 requests/s, prompt=16-32, output=32-96, a pool of 896 tokens",
    },
    reading="Eager admission preempts hundreds of times and computes a good part of the tokens twice, and under an "
    "SLO that is impatient for the first token nobody beats it for all that, which is not what the papers on "
    "forecasts say. The reason is whom `unified` preempts: the last admitted, which have little to recompute "
    "and would have waited otherwise, so that eager admission is a queue whose heads were given their first "
    "token early. What it costs is seen by readers who got that token and then nothing for seconds: with "
    "patience for the first token and none for a stall the order turns round, a share kept free wins, and the "
    "forecast, which has the highest throughput of the three, is between the two. With long prompts the share "
    "that is kept free is never needed, since answers add little to what is there at admission, and it only "
    "keeps requests out. A limit on the 99th percentile of a request's gaps would not show any of this: one "
    "stall of ten seconds among 400 tokens is beyond it.",
)  # fmt: skip
