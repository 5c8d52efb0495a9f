"""How many tokens a step may compute: the chunk of a long prompt, and what running streams wait for."""

from __future__ import annotations

from _kit import GOODPUT, Case, Experiment, Shown, Side
from _work import mixed, spelled

from engine.lab import SLO

STREAMS = "prompt=lognormal:200:0.5:800,output=exp:150:800"
LONG = "prompt=6000,output=32"
PAPERS = "prompt=lognormal:3000:0.5:7000,output=8"
CHAT = {"streams": SLO.parse("ttft=1,itl=0.05"), "long": SLO.parse("ttft=3")}
FIRST = SLO.parse("ttft=1")

EXPERIMENT = Experiment(
    name="chunk_size",
    title="Chunk size: first tokens of long prompts against gaps of running streams",
    question="How many tokens may a step compute (`max_batch_tokens`)? A long prompt is cut into chunks that fill what "
    "running streams leave of it. Scheduler `unified`, cache `paged`.",
    known="Sarathi-Serve (Agrawal et al., OSDI 2024): small chunks bound the gap between tokens, large ones finish "
    "prompts sooner and read weights and earlier KV less often.",
    x="requests/s",
    numbers="tokens a step",
    sides=[Side(str(size), {"max_batch_tokens": size}, size) for size in (256, 512, 1024, 2048, 8192)],
    cases=[
        *(Case(workload="streams and long prompts", x=rate, slo=CHAT, config={"max_running": 256},
               make=mixed(("streams", STREAMS, 10.0), ("long", LONG, rate), requests=400)) for rate in (0.5, 2.0, 4.0)),
        *(Case(workload="long prompts, short answers", x=rate, slo=FIRST, config={"max_running": 256},
               make=spelled(f"poisson:rate={rate},{PAPERS}", 400)) for rate in (6.0, 9.0, 11.0)),
    ],
    real=[
        Case(workload="real", x=1.0, slo={"streams": SLO.parse("ttft=5,itl=0.5"), "long": SLO.parse("ttft=10")},
             make=mixed(("streams", "prompt=32,output=48", 1.0), ("long", "prompt=600,output=4", 0.25), requests=20),
             config={"max_running": 16}),
    ],
    real_sides=("256", "1024"),
    shown=(GOODPUT, Shown("kept", "keep the SLO, %", 100, ".1f"), Shown("ttft.p99", "TTFT p99, s"),
           Shown("long.ttft.p50", "TTFT p50 of long prompts, s"),
           Shown("streams.itl.p99", "stream's own ITL p99, p99, ms", 1e3),
           Shown("itl.p99", "ITL p99, ms", 1e3)),
    panels=(GOODPUT, Shown("ttft.p99", "TTFT p99, s"), Shown("itl.p99", "ITL p99, ms", 1e3)),
    workloads={
        "streams and long prompts": f"Poisson, ten streams a second ({STREAMS}) and so many long prompts ({LONG}); 400 "
        f"requests together; SLO of a stream {CHAT['streams']}, of a long prompt {CHAT['long']}",
        "long prompts, short answers": f"Poisson, {PAPERS}; 400 requests; SLO {FIRST}",
        "real": "Poisson, one stream a second (prompt=32, output=48) and a long prompt in four seconds (prompt=600, "
        "output=4)",
    },
    reading="The step is the gap: on this device 1024 tokens take about 26 ms and 2048 about 50 ms, so that with an "
    "SLO of 50 ms between tokens 2048 is at the edge and 8192 far beyond, for every stream over which a long "
    "prompt arrives. Below 1024 nothing more is won there, and something is lost: a step reads all weights "
    "and costs the host its time for fewer prompt tokens, so that long prompts wait longer, and near "
    "saturation throughput is missing. Where nobody minds gaps (prompts with answers of a few tokens) the "
    "order turns round: the largest steps keep the most, 256 the least. The size that an SLO wants follows "
    "from the device: its limit over the time of a token, about 23 µs here. As in the literature.",
)  # fmt: skip
