"""How much of the output that requests may still make is reserved for when they are admitted."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side, chosen, device
from _work import spelled

from engine.lab import SLO

ASKED = SLO.parse("ttft=5,stall=1")
POOL = {"kvcache": "radix", "max_running": 512, "max_batch_tokens": 512, **device(gpu="a10")}
LOOSE = "prompt=200,output=exp:200:1000,max-tokens=2000"
FULL = "prompt=200,output=lognormal:600:0.3:1000,max-tokens=1000"

EXPERIMENT = Experiment(
    name="reservation",
    title="Reservation ratio against retractions",
    question="Which part of the output that those that run may still make is kept free at admission "
    "(`scheduler.schedule_conservativeness` of `radix`; the ratio begins at 0.7 times it, 1 at most, decays to a "
    "seventh in 600 steps without retractions, and is measured anew after one)? Cache `radix`; the device is an A10, "
    "whose memory holds KV of about 42,000 tokens beside the weights.",
    known="SGLang: too low a ratio retracts requests and computes them twice, too high a one leaves memory idle. "
    "Past-Future (Gong et al., ASPLOS 2025): the right reserve follows from how long answers really get.",
    x="requests/s",
    numbers="conservativeness",
    sides=[
        Side(f"{value:g}", {"scheduler": chosen("radix", schedule_conservativeness=value)}, value)
        for value in (0.05, 0.3, 1.0)
    ],
    cases=[
        *(Case(workload="limits far above answers", x=rate, make=spelled(f"poisson:rate={rate},{LOOSE}", 600),
               slo=ASKED, config=POOL) for rate in (6, 8, 10)),
        *(Case(workload="answers near their limits", x=rate, make=spelled(f"poisson:rate={rate},{FULL}", 300),
               slo=ASKED, config=POOL) for rate in (2, 2.5, 3)),
    ],
    real=[
        Case(workload="real", x=4.0, make=spelled("poisson:rate=4,prompt=24-40,output=32-96", 24),
             slo=SLO.parse("ttft=20,itl=2"), config={"kvcache": "radix", "num_pages": 56, "max_running": 32}),
    ],
    real_sides=("0.05", "1"),
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"), Shown("preemptions", "retractions", format=".0f"),
           Shown("recomputed", "recomputed tokens, thousands", 1e-3, ".1f"), Shown("rows", "rows a step", format=".1f"),
           Shown("ttft.p99", "TTFT p99, s"), Shown("stall.p99", "stall p99, s")),
    panels=(GOODPUT, Shown("recomputed", "recomputed tokens, thousands", 1e-3), Shown("rows", "rows a step")),
    workloads={
        "limits far above answers": f"Poisson, {LOOSE}; 600 requests; SLO {ASKED}",
        "answers near their limits": f"Poisson, {FULL}; 300 requests; SLO {ASKED}",
        "real": "Poisson, 4 requests/s, prompt=24-40, output=32-96 (the limit is the answer), a pool of 896 tokens",
    },
    reading="Where clients ask for ten times what they are answered with, reserving for it costs most of the memory: "
    "the lowest conservativeness wins, nobody is ever retracted, and the default of 1 loses most of the "
    "goodput at 8 requests/s already. Where answers come near their limits the order turns round, though "
    "hardly anybody is retracted there either. The cause is not the tokens that are computed twice, which are "
    "few, but what a retraction does to the ratio: it is measured anew (0.36 in the run that was looked at), "
    "and falls back by a 600th of its first range a step. With 0.05 the first range is tiny, so that one "
    "retraction leaves the engine more careful than conservativeness 1 is (0.1 by then) for thousands of "
    "steps. SGLang's ratio moves by the same rule. Recomputing itself is cheap as long as victims are those "
    "that generated least; it is the victims' stall that an SLO sees.",
)  # fmt: skip
