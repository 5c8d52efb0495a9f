"""Continuous against static batching. Static batching is no part of the engine: it is ten lines of a policy."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side
from _work import spelled

from engine.core import Policy, Wait, hookimpl
from engine.lab import SLO


class StaticBatching(Policy):
    """A batch is filled until its first token; then nobody joins before all of it have ended."""

    name = "static-batching"

    @hookimpl
    def admit(self, step, request):
        if any(other.num_output for other in step.running):
            return Wait("the batch has begun")
        return None


WIDTH = {"max_running": 64}
CHAT = SLO.parse("ttft=2,itl=0.2")
EVEN = "prompt=512,output=128"
TAIL = "prompt=512,output=pareto:128:1.5:2000"
LONG = "prompt=6000,output=64"
TIGHT = SLO.parse("ttft=30,itl=0.02")

EXPERIMENT = Experiment(
    name="batching",
    title="Continuous against static batching",
    question="May a request join a batch that runs (`continuous`), or is a batch filled, and answered to the last "
    "token of its longest answer, before the next begins (`static`)? Scheduler `unified`, cache `paged`, at most 64 "
    "requests at once on both sides; `static` adds one policy, whose only hook is `admit`:",
    known="Orca (Yu et al., OSDI 2022) and vLLM (Kwon et al., SOSP 2023): continuous batching gives several times the "
    "throughput, the more so the more answers differ in length. Static batching is said to have no advantage.",
    x="requests/s",
    sides=(
        Side("static", {"policies": ["batching:StaticBatching"]}),
        Side("continuous", {"policies": []}),
    ),
    cases=[
        *(Case(workload="equal answers", x=rate, make=spelled(f"poisson:rate={rate},{EVEN}", 300), slo=CHAT,
               config=WIDTH) for rate in (2, 4, 8, 16)),
        *(Case(workload="long-tailed answers", x=rate, make=spelled(f"poisson:rate={rate},{TAIL}", 300), slo=CHAT,
               config=WIDTH) for rate in (2, 4, 8, 16)),
        *(Case(workload="long prompts, strict between tokens", x=rate, make=spelled(f"poisson:rate={rate},{LONG}", 200),
               slo=TIGHT, config=WIDTH) for rate in (0.5, 1, 2, 4)),
    ],
    real=[
        Case(workload="real", x=2.0, make=spelled("poisson:rate=2,prompt=32-96,output=pareto:24:1.5:96", 24),
             slo=SLO.parse("ttft=4"), config={"max_running": 16}),
    ],
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"), Shown("tokens", "tokens/s", format=".0f"),
           Shown("rows", "rows a step", format=".1f"), Shown("ttft.p99", "TTFT p99, s"),
           Shown("itl.p99", "ITL p99, ms", 1e3)),
    panels=(GOODPUT, Shown("ttft.p99", "TTFT p99, s"), Shown("itl.p99", "ITL p99, ms", 1e3)),
    workloads={
        "equal answers": f"Poisson, {EVEN}; 300 requests; SLO {CHAT}",
        "long-tailed answers": f"Poisson, {TAIL}; 300 requests; SLO {CHAT}",
        "long prompts, strict between tokens": f"Poisson, {LONG}; 200 requests; SLO {TIGHT}",
        "real": "Poisson, 2 requests/s, prompt=32-96, output=pareto:24:1.5:96, at most 16 running",
    },
    reading="Continuous batching wins wherever answers differ in length: one long answer keeps 63 places of a static "
    "batch empty, and who comes meanwhile waits for its end. With equal answers static batching keeps up for "
    "as long as a batch is over within the limit of TTFT. It wins where long prompts come over streams that "
    "must not stall: with continuous batching each new prompt of 6000 tokens is computed in the middle of "
    "what runs, in steps of up to 8192 tokens, and a static batch computes prompts before its first token "
    "only. That is no merit of static batches, which let nobody in meanwhile: smaller chunks hold the same "
    "limit without the queue (see chunk size, where steps of 512 tokens stay below 15 ms). The static side is "
    "kinder than those of old systems: nothing is padded, and who ends is answered at once.",
)  # fmt: skip
