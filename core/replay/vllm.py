"""Decision traces of vLLM's scheduler and KV manager, replayed on ``unified`` and ``paged``.

Format: a workload of requests with what the model emits, the scheduler's configuration, and one record a step. Page ids
are compared too: ours count from 0, the recorded ones from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.loop import EngineCore
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor, KVCache, Limits, ModelInfo, Policy, Scheduler
from engine.core.registry import make
from engine.core.replay.report import Divergence, NotReplayable, Report
from engine.core.request import Request, SamplingParams

Trace = Mapping[str, Any]
ANY_TOKEN = 2**31  # the vocabulary of a recording is not known
DEFAULTS: Mapping[str, Any] = {
    "scheduled": [],
    "new": [],
    "resumed": [],
    "cached_tokens": {},
    "spec": {},
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


def replay(data: Trace, policies: Sequence[Policy] = ()) -> Report:
    """Decide the workload anew and compare each step; stops at the first difference.

    Args:
        policies: run with these plugins beside the scheduler.

    Raises:
        NotReplayable: asynchronous scheduling, which ``unified`` does not decide yet.
    """
    config = data["config"]
    if config["async"]:
        raise NotReplayable("asynchronous scheduling is not decided yet")
    core = _core(data, policies)
    try:
        for record in data["trace"]:
            decided = _step(core, data, record["step"])
            recorded = {name: record.get(name, default) for name, default in DEFAULTS.items()}
            if decided != recorded:
                return Report(data["name"], record["step"], Divergence(record["step"], recorded, decided))
    finally:
        core.close()
    return Report(data["name"], len(data["trace"]))


class RecordedModel(Executor):
    """Emits what the recording says that each request emits, and proposes the drafts that it says."""

    name = "recorded"

    def __init__(self, requests: Sequence[Trace], max_model_len: int) -> None:
        super().__init__()
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
        for row, (request, samples) in enumerate(zip(plan.requests, plan.samples, strict=True)):
            tokens.append(self._emit(request, plan.drafts.get(request, ())) if samples else ())
            drafts = self._drafts[request.id]
            if samples and drafts:
                known = request.num_output + len(tokens[-1])
                proposals[row] = tuple(drafts[known]) if known < len(drafts) else ()
        return Outcome(plan, tokens, proposals=proposals)

    def _emit(self, request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
        at = request.num_output
        output = [*self._outputs[request.id][at : at + len(drafts) + 1], *[0] * (len(drafts) + 1)]
        accepted = next((n for n, draft in enumerate(drafts) if draft != output[n]), len(drafts))
        return tuple(output[: accepted + 1])


def _core(data: Trace, policies: Sequence[Policy]) -> EngineCore:
    config = data["config"]
    executor = RecordedModel(data["requests"], config["max_model_len"])
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
    scheduler = make("scheduler", "unified", decisions)
    kv = make("kvcache", "paged", caching)
    assert isinstance(scheduler, Scheduler)
    assert isinstance(kv, KVCache)
    limits = Limits(
        max_model_len=config["max_model_len"],
        max_batch_tokens=config["max_num_scheduled_tokens"],
        max_running=config["max_num_seqs"],
        page_size=config["block_size"],
        num_pages=config["usable_blocks"],
        vocab_size=ANY_TOKEN,
    )
    return EngineCore(
        limits=limits, model=executor.load(), scheduler=scheduler, kv=kv, executor=executor, policies=policies
    )


def _step(core: EngineCore, data: Trace, number: int) -> dict[str, Any]:
    requests = data["requests"]
    for request in requests:
        if request["arrival_step"] == number:
            _add(core, request)
    for request in requests:
        if request.get("abort_step") == number and request.get("abort_phase") != "mid":
            core.abort(request["id"])
    removed: list[str] = []
    for action in data.get("actions", ()):
        if action["step"] == number:
            removed += reset_prefix_cache(core, running_too=action["reset_running"])
    resumable = {request.id for request in core.requests.values() if request.preemptions}
    held = {request.id: len(request.pages) for request in core.running}
    plan = core.plan()
    tables = {request.id: list(table) for request, table in zip(plan.requests, plan.tables, strict=True)}
    for request in requests:
        if request.get("abort_step") == number and request.get("abort_phase") == "mid":
            core.abort(request["id"])
    outcome = core.executor.execute(plan)
    core.commit(outcome)
    core.take_deltas()
    admitted = [request.id for request in plan.admitted]
    starts = {request.id: start for request, start in zip(plan.requests, plan.starts, strict=True)}
    fresh = {name: [page + 1 for page in t[0 if name in admitted else held[name] :]] for name, t in tables.items()}
    return {
        "scheduled": [[request.id, count] for request, count in zip(plan.requests, plan.counts, strict=True)],
        "new": [name for name in admitted if name not in resumable],
        "resumed": [name for name in admitted if name in resumable],
        "cached_tokens": {name: starts[name] for name in admitted},
        "spec": {request.id: list(drafts) for request, drafts in plan.drafts.items()},
        "preempted": removed + [request.id for request in plan.preempted],
        "finished": [request.id for request in outcome.finished],
        "new_blocks": {name: pages for name, pages in fresh.items() if pages},
        "free_blocks": core.kv.numbers().available,
        "running": [request.id for request in core.running],
        "waiting": [request.id for request in core.waiting],
    }


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
