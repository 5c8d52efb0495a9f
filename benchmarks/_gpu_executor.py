"""The torch executor on a device: tokens against the CPU's, speed with and without graphs and overlap, memory."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from _gpu_report import Report

from engine.core import Batch, EngineConfig, EngineCore, SamplingParams, assemble
from engine.core.plan import Outcome, Plan
from engine.core.sampling import TokenLogprobs

TIE = 2e-3  # log-probabilities so close are one to two orders of sums
APART = {"bfloat16": 0.2, "bfloat16+fp8": 0.5}
"""How far log-probabilities of prompts may be from float32's, on average. On a CPU it is 0.07 of bfloat16, and 0.16 of
KV in fp8 under float32 (the default model, prompts as these)."""


@contextmanager
def engine(model: str, rows: int, *, overlap: bool, attention: str = "auto", **options: Any) -> Iterator[EngineCore]:
    """An engine of the torch executor, closed at the end."""
    core = assemble(
        EngineConfig(
            model=model,
            executor={"name": "torch", **options},
            attention=attention,
            overlap=overlap,
            num_pages=max(64, rows * 24),
            max_running=rows,
        )
    )
    try:
        yield core
    finally:
        core.close()


def prompts(core: EngineCore, count: int, length: int) -> list[list[int]]:
    """Random tokens, the same every time."""
    rng = random.Random(0)
    most = core.model.vocab_size - 1
    return [[rng.randrange(3, most) for _ in range(length - at % 5)] for at in range(count)]


Reports = list[list[TokenLogprobs]]


def said(core: EngineCore, count: int, length: int, output: int, **wishes: Any) -> tuple[list[list[int]], Reports]:
    """Greedy outputs, and what was reported of their tokens, or of the prompts'."""
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, **wishes)
    requests = [core.add(prompt, params) for prompt in prompts(core, count, length)]
    reports: dict[str, list[TokenLogprobs]] = {request.id: [] for request in requests}
    while core.has_work:
        for delta in core.step():
            reports[delta.request_id] += delta.logprobs or delta.prompt_logprobs
    return [request.output for request in requests], [reports[request.id] for request in requests]


def same_tokens(report: Report, model: str, backends: Sequence[tuple[str, str]]) -> None:
    """float32 says on the device what the reference says on the CPU, up to proven ties; other types think nearly so."""
    count, length, output = (2, 5, 4) if report.tiny else (8, 40, 32)
    with engine(model, count, overlap=False, attention="torch", device="cpu") as core:
        wanted, reports = said(core, count, length, output, logprobs=2)
        _, thought = said(core, count, length, 1, prompt_logprobs=0)
    rows = []
    for name, kind in backends:
        dtype, _, fp8 = kind.partition("+")
        if report.late or dtype == "float16":
            continue
        options = {"device": str(report.device), "dtype": dtype, "kv_dtype": "fp8" if fp8 else "auto", "ahead": True}
        with engine(model, count, overlap=True, attention=name, **options) as core:
            found, _ = said(core, count, length, output)
            _, thinks = said(core, count, length, 1, prompt_logprobs=0)
            graphs = str(core.describe()["model"]["graphs"])
        lengths = [common(one, two) for one, two in zip(found, wanted, strict=True)]
        part = sum(lengths) / (count * output)
        ties = sum(_tied(reports[at][same]) for at, same in enumerate(lengths) if same < output)
        equal = sum(same == output for same in lengths)
        apart = _apart(thinks, thought)
        rows.append((name, kind, graphs, f"{equal}/{count}", ties, f"{part:.1%}", f"{apart:.4f}"))
        if dtype == "float32":
            good = equal + ties == count
            report.check(good, f"{name} in {kind} says what the CPU says, up to ties ({equal} equal, {ties} ties)")
        else:
            words = f"{name} in {kind}: log-probabilities are {apart:.3f} from float32's; {APART[kind]} is allowed"
            report.check(apart <= APART[kind], words)
    report.table(("backend", "type", "graphs", "equal outputs", "ties", "common part", "log-probabilities off"), rows)


def _apart(one: Reports, other: Reports) -> float:
    """Mean difference of the log-probabilities of the same tokens."""
    pairs = [pair for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True)]
    return statistics.mean(abs(a.logprob - b.logprob) for a, b in pairs)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to where they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _tied(token: TokenLogprobs) -> bool:
    """Whether the reference's own choice was one between two that are as likely."""
    first, second = token.top_logprobs[:2]
    return first - second < TIE


class Spans:
    """Notes where the kernels of each step begin and end.

    On a GPU by marks among them: before the forward pass, when its inputs and page tables are there, and after the copy
    of its tokens. What the host does between steps is in no span, but for what the device does meanwhile. On the CPU by
    the clock, around ``launch``.
    """

    def __init__(self, core: EngineCore, report: Report) -> None:
        self._report = report
        self.steps: list[tuple[int, Any, Any]] = []
        executor: Any = core.executor
        if not report.on_gpu:
            self._launch = executor.launch
            executor.launch = self._timed
            return
        launcher, attention = executor._runner._launcher, executor._attention
        self._choose, self._begin = launcher._choose, self._mark()
        launcher._choose = self._chosen
        attention.plan_batch = partial(self._planned, attention.plan_batch)
        if launcher.graphs is not None:
            launcher.graphs._plan = partial(self._planned, launcher.graphs._plan)

    def gaps(self, rows: int) -> list[float]:
        """µs between steps of steady decode."""
        steps = [step for step in self.steps if step[0] == rows][4:]
        if self._report.on_gpu:
            torch.cuda.synchronize(self._report.device)
            return [1e3 * one[2].elapsed_time(two[1]) for one, two in itertools.pairwise(steps)]
        return [1e6 * (two[1] - one[2]) for one, two in itertools.pairwise(steps)]

    def _timed(self, plan: Plan) -> Callable[[], Outcome]:
        begin = time.perf_counter()
        answer = self._launch(plan)
        self.steps.append((plan.total_tokens, begin, time.perf_counter()))
        return answer

    def _planned(self, plan: Callable[[Batch], None], batch: Batch) -> None:
        plan(batch)
        self._begin = self._mark()

    def _chosen(self, plan: Plan, *rest: Any) -> Any:
        launched = self._choose(plan, *rest)
        self.steps.append((plan.total_tokens, self._begin, self._mark()))
        return launched

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._report.device))
        return event


class Way(NamedTuple):
    """A way to run steps."""

    graphs: str
    ahead: bool
    overlap: bool


WAYS = (
    Way("off", False, False), Way("off", True, True), Way("auto", False, False), Way("auto", True, True),
)  # fmt: skip


def speed(report: Report, model: str) -> None:
    """Output tokens a second, and how long the device has nothing to do between two steps."""
    rows, length, output = (2, 5, 8) if report.tiny else (32, 64, 96)
    dtype = "bfloat16" if report.on_gpu else "float32"
    lines = []
    for way in WAYS if report.on_gpu else WAYS[:2]:
        if report.late:
            report.leave(f"speed of {way}: the time is up")
            continue
        options = {"device": str(report.device), "dtype": dtype, "graphs": way.graphs, "ahead": way.ahead}
        with engine(model, rows, overlap=way.overlap, **options) as core:
            said(core, rows, length, 4)  # kernels are compiled, memory is warm
            spans = Spans(core, report)
            began = time.perf_counter()
            said(core, rows, length, output)
            took = time.perf_counter() - began
            gaps = sorted(spans.gaps(rows))
            about = core.describe()["model"]
            has = core.executor._runner._launcher is not None and core.executor._runner._launcher.graphs is not None
        if way.graphs == "auto" and about["graphs"].startswith("of decode"):
            report.check(has, f"graphs that {about['attention'][:40]} says it has")
        middle = f"{statistics.median(gaps):.0f} us" if gaps else "?"
        late = f"{gaps[int(0.9 * (len(gaps) - 1))]:.0f} us" if gaps else "?"
        loop = "overlap" if way.overlap else "sync"
        lines.append((about["attention"][:40], about["graphs"][:40], loop, f"{rows * output / took:.0f}", middle, late))
    report.table(("attention", "graphs", "loop", "tokens/s", "gap p50", "gap p90"), lines)


def memory(report: Report, model: str, steps: int = 200) -> None:
    """Memory in use does not grow over steady steps."""
    rows = 2 if report.tiny else 16
    steps = 20 if report.tiny else steps
    options = {"device": str(report.device), "dtype": "bfloat16" if report.on_gpu else "float32", "ahead": True}
    with engine(model, rows, overlap=True, **options) as core:
        params = SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
        for prompt in prompts(core, rows, 12):
            core.add(prompt, params)
        for _ in range(20):
            core.step()
        before = _in_use(report)
        for _ in range(steps):
            core.step()
        core.drain()
        grown = _in_use(report) - before
    limit = (1 if report.on_gpu else 64) << 20
    report.check(grown <= limit, f"{steps} steps need {grown / 2**20:.1f} MiB more than the first 20 did")


def _in_use(report: Report) -> int:
    if report.on_gpu:
        torch.cuda.synchronize(report.device)
        return int(torch.cuda.memory_allocated(report.device))
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
