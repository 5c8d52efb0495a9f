"""Decision traces of vLLM's scheduler and KV manager, replayed on ``unified`` and ``paged``.

Format: a workload of requests with what the model emits, the scheduler's configuration, and one record a step. Page ids
are compared too: ours count from 0, the recorded ones from 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.loop import EngineCore
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor, KVCache, Limits, ModelInfo, Policy
from engine.core.replay.cores import ANY_TOKEN, core_for
from engine.core.replay.report import Divergence, Report
from engine.core.request import Request, SamplingParams

Trace = Mapping[str, Any]
DEFAULTS: Mapping[str, Any] = {
    "scheduled": [],
    "new": [],
    "resumed": [],
    "cached_tokens": {},
    "spec": {},
    "emitted": {},
    "preempted": [],
    "finished": [],
    "new_blocks": {},
    "free_blocks": None,
    "running": [],
    "waiting": [],
}
"""Fields that are compared, with their value where a record leaves them out."""


def recognises(data: Trace) -> bool:
    """Whether the data are such a trace, told by their content."""
    config = data.get("config")
    return isinstance(config, Mapping) and "num_blocks" in config and "requests" in data and "trace" in data


def replay(data: Trace, policies: Sequence[Policy] = (), kvcache: KVCache | None = None) -> Report:
    """Decide the workload anew and compare each step; stops at the first difference.

    Args:
        policies: run with these plugins beside the scheduler.
        kvcache: instead of ``paged``. Another cache has other page numbers: these are then not compared.
    """
    replayer = Replayer(data, policies, kvcache)
    ignored = () if kvcache is None else ("new_blocks",)
    core = replayer.core
    try:
        for record in data["trace"]:
            decided = replayer.step(record["step"])
            recorded = {name: record.get(name, default) for name, default in DEFAULTS.items()}
            for name in ignored:
                recorded[name] = decided[name] = {}
            if decided != recorded:
                return Report(data["name"], record["step"], Divergence(record["step"], recorded, decided))
    finally:
        core.close()
    return Report(data["name"], len(data["trace"]))


class RecordedModel(Executor):
    """Emits what the recording says that each request emits, and proposes the drafts that it says."""

    name = "recorded"

    def __init__(self, requests: Sequence[Trace], max_model_len: int, *, overlap: bool) -> None:
        super().__init__()
        self.verified: dict[str, tuple[int, ...]] = {}  # drafts that the last plan verified
        self._emitted: Counter[str] = Counter()  # tokens so far, those of steps in flight included
        self._overlap = overlap
        self._outputs = {r["id"]: r["output"] for r in requests}
        self._drafts = {r["id"]: r.get("drafts") for r in requests}
        self._length = max_model_len

    def load(self) -> ModelInfo:
        """A model of unknown vocabulary."""
        return ModelInfo(name="recorded", vocab_size=ANY_TOKEN, max_model_len=self._length)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""

    def execute(self, plan: Plan) -> Outcome:
        """The k-th token of each request that samples, after the drafts that equal what comes anyway."""
        tokens: list[tuple[int, ...]] = []
        proposals: dict[int, tuple[int, ...]] = {}
        self.verified = {}
        for row, (request, samples) in enumerate(zip(plan.requests, plan.samples, strict=True)):
            planned = plan.drafts.get(request, ())
            if planned:
                self.verified[request.id] = self._drafted(request, planned, known=request not in plan.admitted)
            tokens.append(self._emit(request, self.verified.get(request.id, ())) if samples else ())
            if samples and self._drafts[request.id]:
                proposals[row] = self._propose(request)
        return Outcome(plan, tokens, proposals=proposals)

    def _drafted(self, request: Request, planned: Sequence[int], *, known: bool) -> tuple[int, ...]:
        """The drafts of a row: as planned; or, planned unknown, those proposed when the row before was computed."""
        if not (self._overlap and known):
            return tuple(planned)
        return (*self._propose(request), *planned)[: len(planned)]

    def _propose(self, request: Request) -> tuple[int, ...]:
        drafts, at = self._drafts[request.id], self._emitted[request.id]
        return tuple(drafts[at]) if drafts and at < len(drafts) else ()

    def _emit(self, request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
        at = self._emitted[request.id]
        output = [*self._outputs[request.id][at : at + len(drafts) + 1], *[0] * (len(drafts) + 1)]
        accepted = next((n for n, draft in enumerate(drafts) if draft != output[n]), len(drafts))
        self._emitted[request.id] += accepted + 1
        return tuple(output[: accepted + 1])


def _core(data: Trace, executor: RecordedModel, policies: Sequence[Policy], kv: KVCache | None) -> EngineCore:
    config = data["config"]
    decisions = {
        "policy": config["policy"],
        "enable_chunked_prefill": config["chunked_prefill"],
        "long_prefill_token_threshold": config["long_prefill_token_threshold"],
        "reserve_full_sequence": config["reserve_full_isl"],
        "watermark": config["watermark"],
        "num_spec_tokens": config["num_spec_tokens"],
        "num_lookahead_tokens": config["num_lookahead_tokens"],
    }
    caching = {
        "enable_prefix_caching": config["enable_prefix_caching"],
        "drop_last_page": config["eagle_drop_last_block"],
    }
    limits = Limits(
        max_model_len=config["max_model_len"],
        max_batch_tokens=config["max_num_scheduled_tokens"],
        max_running=config["max_num_seqs"],
        page_size=config["block_size"],
        num_pages=config["usable_blocks"],
        vocab_size=ANY_TOKEN,
    )
    return core_for(
        limits,
        ("unified", decisions),
        kv or ("paged", caching),
        model=executor.load(),
        executor=executor,
        policies=policies,
        overlap=config["async"],
    )


class Replayer:
    """Decides a recorded workload anew, one step at a time.

    Args:
        data: the trace.
        policies: plugins that run beside the scheduler.
        kvcache: instead of ``paged``.
    """

    def __init__(self, data: Trace, policies: Sequence[Policy] = (), kvcache: KVCache | None = None) -> None:
        config = data["config"]
        self._data = data
        self._overlap: bool = config["async"]
        self._model = RecordedModel(data["requests"], config["max_model_len"], overlap=self._overlap)
        self._flying: deque[Outcome] = deque()  # computed and not committed
        self.core = _core(data, self._model, policies, kvcache)

    def step(self, number: int) -> dict[str, Any]:
        """One step as recorded: arrivals, aborts, actions, the plan, its outcome (overlap: that of the step before)."""
        core = self.core
        for request in self._data["requests"]:
            if request["arrival_step"] == number:
                _add(core, request)
        self._abort(number, "before")
        removed: list[str] = []
        for action in self._data.get("actions", ()):
            if action["step"] == number:
                removed += reset_prefix_cache(core, running_too=action["reset_running"])
        resumable = {request.id for request in core.requests.values() if request.preemptions}
        held = {request.id: len(request.pages) for request in core.running}
        plan = core.plan()
        tables = {request.id: list(table) for request, table in zip(plan.requests, plan.tables, strict=True)}
        self._abort(number, "mid")
        self._flying.append(core.executor.execute(plan))
        outcome = self._flying.popleft() if len(self._flying) > self._overlap else None
        if outcome is not None:
            core.commit(outcome)
        admitted = [request.id for request in plan.admitted]
        starts = {request.id: start for request, start in zip(plan.requests, plan.starts, strict=True)}
        fresh = {name: [page + 1 for page in t[0 if name in admitted else held[name] :]] for name, t in tables.items()}
        emitted = {news.request_id: len(news.tokens) for news in core.take_deltas() if news.tokens}
        return {
            "scheduled": [[request.id, count] for request, count in zip(plan.requests, plan.counts, strict=True)],
            "new": [name for name in admitted if name not in resumable],
            "resumed": [name for name in admitted if name in resumable],
            "cached_tokens": {name: starts[name] for name in admitted},
            "spec": {name: list(drafts) for name, drafts in self._model.verified.items()},
            "emitted": emitted if self._overlap or self._data["config"]["num_spec_tokens"] else {},
            "preempted": removed + [request.id for request in plan.preempted],
            "finished": [] if outcome is None else [request.id for request in outcome.finished],
            "new_blocks": {name: pages for name, pages in fresh.items() if pages},
            "free_blocks": core.kv.numbers().available,
            "running": [request.id for request in core.running],
            "waiting": [request.id for request in core.waiting],
        }

    def _abort(self, number: int, phase: str) -> None:
        for request in self._data["requests"]:
            if request.get("abort_step") == number and (request.get("abort_phase") == "mid") == (phase == "mid"):
                self.core.abort(request["id"])


def _add(core: EngineCore, request: Trace) -> None:
    room = core.limits.max_model_len - len(request["prompt"])
    core.add(
        request["prompt"],
        SamplingParams(
            max_tokens=min(request["max_tokens"], room),
            stop_token_ids=tuple(request["stop_token_ids"]),
            min_tokens=min(request.get("min_tokens", 0), request["max_tokens"], room),
        ),
        request_id=request["id"],
        priority=request["priority"],
        salt=request["cache_salt"] or "",
        adapter=request.get("lora_name") or "",
        arrival=request["arrival_time"],
        read_cache=not request.get("skip_reading_prefix_cache"),
    )


def reset_prefix_cache(core: EngineCore, *, running_too: bool) -> list[str]:
    """Forget all cached content; nothing happens while pages are in use, unless those that run give up theirs first.

    Mutates. Returns who was preempted for it, the last admitted first.
    """
    victims = list(reversed(core.running)) if running_too else []
    for request in victims:
        core.give_up(request, front=True)
    if not core.kv.numbers().pinned:
        core.kv.reset()
    return [request.id for request in victims]
