"""Records what the real vLLM scheduler decides on a workload, in the format that ``engine.core.replay.vllm`` replays.

The model is a fake: it emits what the workload says. Order of events within a step: arrivals, aborts, actions,
scheduling, aborts during execution, output (of this step; asynchronous: of the one before), new drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _vllm_peer as peer

Workload = Mapping[str, Any]
MAX_STEPS = 2000
PADDING = -1  # a draft that never matches


class Recording(NamedTuple):
    """What vLLM decided.

    Attributes:
        trace: a record for each step.
        ended: False where ``MAX_STEPS`` were not enough: then vLLM most likely thrashes for ever.
        stale_from: the first step in which a request was preempted after the very step had registered a block for it:
            vLLM keeps that matchable although nobody computes it.
    """

    trace: list[dict[str, Any]]
    ended: bool
    stale_from: int | None


def record(workload: Workload) -> Recording:
    """Run the workload on vLLM's scheduler until no request is left and no output is awaited."""
    return _Recorder(workload).run()


class FakeModel:
    """Emits the k-th output token of each request; with drafts, those that equal what comes anyway and one more."""

    def __init__(self, requests: Sequence[Workload], *, looks_up: bool) -> None:
        self._outputs = {r["id"]: r["output"] for r in requests}
        self._drafts = {r["id"]: r.get("drafts") or [] for r in requests}
        self._emitted = dict.fromkeys(self._outputs, 0)  # in flight included
        self._looks_up = looks_up

    def drafts(self, name: str, planned: Sequence[int], fresh: bool) -> list[int]:
        """The drafts that are verified: the planned ones, or (asynchronous) those known when the step executes."""
        if not self._looks_up:
            return list(planned)
        found = [] if fresh else self.proposals(name)[: len(planned)]
        return [*found, *[PADDING] * (len(planned) - len(found))]

    def emit(self, name: str, drafts: Sequence[int]) -> list[int]:
        """Tokens of one row that reaches the end of what it knows. Mutates: they count as emitted."""
        at = self._emitted[name]
        coming = [*self._outputs[name][at : at + len(drafts) + 1], *[0] * (len(drafts) + 1)]
        accepted = next((n for n, draft in enumerate(drafts) if draft != coming[n]), len(drafts))
        self._emitted[name] += accepted + 1
        return list(coming[: accepted + 1])

    def proposals(self, name: str) -> list[int]:
        """Drafts for what follows the tokens emitted so far."""
        at = self._emitted[name]
        return list(self._drafts[name][at]) if at < len(self._drafts[name]) else []


class _Recorder:
    def __init__(self, workload: Workload) -> None:
        self._config = workload["config"]
        self._requests = workload["requests"]
        self._actions = workload.get("actions", ())
        self._async: bool = self._config["async"]
        self._scheduler = _scheduler(self._config)
        self._hasher = peer.make_hasher(self._config["block_size"]) if self._config["enable_prefix_caching"] else None
        self._model = FakeModel(self._requests, looks_up=self._async)
        self._preempted: list[str] = []
        self._number = 0
        self._stale_from: int | None = None
        self._pending: tuple[int, Any, Any] | None = None  # step, what was scheduled, what the model made of it
        self._listen()

    def _listen(self) -> None:
        """vLLM tells who was preempted as a set: their order is heard at the source."""
        preempt = self._scheduler._preempt_request
        (registered,) = [m.num_cached_block for m in self._scheduler.kv_cache_manager.coordinator.single_type_managers]

        def heard(request: Any, *args: Any, **kwargs: Any) -> None:
            name = request.request_id
            self._preempted.append(name)
            planned_before = request.num_computed_tokens // self._config["block_size"]
            if self._hasher and self._stale_from is None and registered.get(name, 0) > planned_before:
                self._stale_from = self._number
            preempt(request, *args, **kwargs)

        self._scheduler._preempt_request = heard

    def run(self) -> Recording:
        trace: list[dict[str, Any]] = []
        last = max(r["arrival_step"] for r in self._requests)
        while (left := len(trace) <= last or self._busy()) and len(trace) < MAX_STEPS:
            trace.append(self._step(len(trace)))
        return Recording(trace, not left, self._stale_from)

    def _busy(self) -> bool:
        awaited = self._pending is not None and self._pending[1].num_scheduled_tokens
        return bool(awaited or self._scheduler.get_num_unfinished_requests())

    def _step(self, number: int) -> dict[str, Any]:
        self._number, self._preempted = number, []
        for request in self._requests:
            if request["arrival_step"] == number:
                self._scheduler.add_request(_request(request, self._hasher))
        aborted = self._abort(number, "before")
        actions = [
            ["reset_prefix_cache", self._scheduler.reset_prefix_cache(action["reset_running"])]
            for action in self._actions
            if action["step"] == number
        ]
        record: dict[str, Any] = {"step": number}
        if actions:
            record["actions"] = actions
        current = self._schedule(number, record)
        aborted += self._abort(number, "mid")
        if aborted:
            record["aborted"] = aborted
        if self._async:
            current, self._pending = self._pending, current
            record["applied"] = current[0] if current else None
        self._apply(current, record)
        return record | self._standing()

    def _abort(self, number: int, phase: str) -> list[str]:
        from vllm.v1.request import RequestStatus

        names = [
            request["id"]
            for request in self._requests
            if request.get("abort_step") == number and (request.get("abort_phase") or "before") == phase
        ]
        return [n for n in names if self._scheduler.finish_requests(n, RequestStatus.FINISHED_ABORTED)]

    def _schedule(self, number: int, record: dict[str, Any]) -> tuple[int, Any, Any] | None:
        scheduler, blocks = self._scheduler, self._blocks
        running = set(self._running())
        held = {name: len(blocks(name)) for name in running}
        plan = scheduler.schedule() if scheduler.has_requests() else None
        counts = plan.num_scheduled_tokens if plan is not None else {}
        requests = {name: scheduler.requests[name] for name in counts}
        # A victim of a forced reset is admitted anew in the same step.
        admitted = [name for name in counts if name not in running or name in self._preempted]
        tables = {name: blocks(name)[0 if name in admitted else held[name] :] for name in counts}
        record |= {
            "scheduled": [[name, count] for name, count in counts.items()],
            "new": [name for name in admitted if not requests[name].num_preemptions],
            "resumed": [name for name in admitted if requests[name].num_preemptions],
            "cached_tokens": {name: requests[name].num_computed_tokens - counts[name] for name in admitted},
            "preempted": list(self._preempted),
        }
        if new_blocks := {name: table for name, table in tables.items() if table}:
            record["new_blocks"] = new_blocks
        if plan is None:
            return None
        return number, plan, self._execute(plan, admitted, record)

    def _execute(self, plan: Any, admitted: Sequence[str], record: dict[str, Any]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(plan.num_scheduled_tokens)
        spec: dict[str, list[int]] = {}
        tokens: list[list[int]] = []
        for name in names:
            if self._scheduler.requests[name].is_prefill_chunk:
                tokens.append([])
                continue
            planned = plan.scheduled_spec_decode_tokens.get(name, ())
            drafts = self._model.drafts(name, planned, name in admitted)
            if drafts:
                spec[name] = drafts
            tokens.append(self._model.emit(name, drafts))
        if spec:
            record["spec"] = spec
        rows = {name: row for row, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=rows, sampled_token_ids=tokens)

    def _apply(self, step: tuple[int, Any, Any] | None, record: dict[str, Any]) -> None:
        emitted: dict[str, int] = {}
        reasons: dict[str, str] = {}
        if step is not None:
            _, plan, output = step
            news = self._scheduler.update_from_output(plan, output)
            for one in (one for client in news.values() for one in client.outputs):
                if one.new_token_ids:
                    emitted[one.request_id] = len(one.new_token_ids)
                if one.finish_reason is not None:
                    reasons[one.request_id] = str(one.finish_reason)
            if self._config["num_spec_tokens"] and not self._async:
                self._propose(plan)
        record["finished"] = list(reasons)
        if reasons:
            record["finish_reasons"] = reasons
        if self._async or self._config["num_spec_tokens"]:
            record["emitted"] = emitted

    def _propose(self, plan: Any) -> None:
        from vllm.v1.outputs import DraftTokenIds

        names = list(plan.num_scheduled_tokens)
        self._scheduler.update_draft_token_ids(DraftTokenIds(names, [self._model.proposals(name) for name in names]))

    def _standing(self) -> dict[str, Any]:
        pool = self._scheduler.kv_cache_manager.block_pool
        hashes = {"cached_hashes": len(pool.cached_block_hash_to_block)} if self._hasher else {}
        return {
            "free_blocks": pool.get_num_free_blocks(),
            **hashes,
            "running": self._running(),
            "waiting": self._waiting(),
        }

    def _blocks(self, name: str) -> list[int]:
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(name)
        return list(blocks)

    def _running(self) -> list[str]:
        return [request.request_id for request in self._scheduler.running]

    def _waiting(self) -> list[str]:
        scheduler = self._scheduler
        return [request.request_id for queue in (scheduler.skipped_waiting, scheduler.waiting) for request in queue]


def _scheduler(config: Workload) -> Any:
    scheduler = peer.make_scheduler(
        num_blocks=config["num_blocks"],
        block_size=config["block_size"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        asynchronous=config["async"],
        policy=config["policy"],
        enable_prefix_caching=config["enable_prefix_caching"],
        enable_chunked_prefill=config["chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        reserve_full_isl=config["reserve_full_isl"],
        watermark=config["watermark"],
        spec_method=config["spec_method"],
        num_spec_tokens=config["num_spec_tokens"],
    )
    taken = {
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "num_lookahead_tokens": scheduler.num_lookahead_tokens,
        "eagle_drop_last_block": scheduler.use_eagle,
        "max_model_len": scheduler.max_model_len,
        "block_size": scheduler.block_size,
        "enable_prefix_caching": scheduler.kv_cache_manager.enable_caching,
        "chunked_prefill": scheduler.scheduler_config.enable_chunked_prefill,
    }
    other = {name: (config[name], value) for name, value in taken.items() if config[name] != value}
    if other:
        raise ValueError(f"vLLM does not run as the workload says (asked, in force): {other}")
    return scheduler


def _request(request: Workload, hasher: Any) -> Any:
    return peer.make_request(
        request["id"],
        request["prompt"],
        hasher,
        max_tokens=request["max_tokens"],
        min_tokens=request.get("min_tokens") or 0,
        stop_token_ids=request["stop_token_ids"],
        priority=request["priority"],
        arrival_time=request["arrival_time"],
        cache_salt=request["cache_salt"],
        lora_name=request.get("lora_name"),
        skip_reading_prefix_cache=request.get("skip_reading_prefix_cache"),
    )
