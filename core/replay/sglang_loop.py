"""Level loop: the whole scheduler. An iteration is arrivals, aborts, plan, run, results; then the state is compared.

Where ours is built otherwise on purpose, the replay stands in between: an abort of a request that decodes is delivered
after its next token, as SGLang ends it; a prompt that cannot fit is sent as the single token that SGLang makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.errors import QueueFull
from engine.core.loop import EngineCore
from engine.core.plan import Outcome, Plan, Why
from engine.core.protocols import Executor, ModelInfo
from engine.core.replay.cores import ANY_TOKEN
from engine.core.replay.report import Divergence, NotReplayable, Report
from engine.core.replay.sglang_model import UNBOUNDED, core_of, submit
from engine.core.request import Request, State

Trace = Mapping[str, Any]
TOLERANCE = 1e-9
SAME_OPTIONS = (
    "max_prefill_tokens",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "prefill_max_requests",
    "schedule_conservativeness",
    "priority_scheduling_preemption_threshold",
    "disable_priority_preemption",
    "retraction_policy",
)


def replay(data: Trace) -> Report:
    """Decide the workload anew and compare each iteration, then what became of each request.

    Raises:
        NotReplayable: the recording shows requests that never end, a defect that is not to be decided again.
    """
    if any(result["reason"] is None for result in data["results"].values()):
        raise NotReplayable("it records a defect of SGLang's: some requests never end")
    player = Player(data)
    try:
        for record in data["trace"]:
            decided = player.step(record["step"])
            if abs(decided["new_token_ratio"] - record["new_token_ratio"]) < TOLERANCE:
                decided["new_token_ratio"] = record["new_token_ratio"]
            if decided != record:
                return Report(data["name"], record["step"], Divergence(record["step"], record, decided))
        if player.results != data["results"]:
            became = {name: player.results.get(name) for name in data["results"]}
            divergence = Divergence(len(data["trace"]), data["results"], became)
            return Report(data["name"], len(data["trace"]), divergence)
    finally:
        player.core.close()
    return Report(data["name"], len(data["trace"]))


class RecordedModel(Executor):
    """Emits what the recording says that each request emits."""

    name = "recorded"

    def __init__(self, requests: Sequence[Trace]) -> None:
        super().__init__()
        self._outputs = {r["id"]: r["output"] for r in requests}

    def load(self) -> ModelInfo:
        """A model of unknown vocabulary and length."""
        return ModelInfo(name="recorded", vocab_size=ANY_TOKEN, max_model_len=UNBOUNDED)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""

    def execute(self, plan: Plan) -> Outcome:
        """The k-th token of each request that samples."""
        rows = zip(plan.requests, plan.samples, strict=True)
        return Outcome(plan, [self._emit(request) if samples else () for request, samples in rows])

    def _emit(self, request: Request) -> tuple[int, ...]:
        output, at = self._outputs[request.id], request.num_output
        return (output[at] if at < len(output) else 0,)


class Player:
    """Plays a workload, iteration by iteration."""

    def __init__(self, data: Trace) -> None:
        config = data["config"]
        self.config = config
        self.requests = data["requests"]
        self.page = config["page_size"]
        self.core = core_of(
            config,
            {"policy": config["schedule_policy"], **{name: config[name] for name in SAME_OPTIONS}},
            pages=config["max_total_num_tokens"] // self.page,
            executor=RecordedModel(self.requests),
            max_running=config["max_running_requests"],
            max_waiting=config["max_queued_requests"] or UNBOUNDED,
        )
        self.doomed: set[str] = set()  # to end as aborted with their next token
        self.aborted: list[str] = []  # in this iteration
        self.results: dict[str, Any] = {}

    def step(self, number: int) -> dict[str, Any]:
        """One iteration; the state after it, in the recording's terms."""
        self.aborted = []
        for entry in self.requests:
            if entry["arrival_step"] == number:
                self._arrive(entry)
        for entry in self.requests:
            if entry["abort_step"] == number:
                self._abort(entry["id"])
        core = self.core
        plan = core.plan()
        chunked = core.scheduler.chunked  # type: ignore[attr-defined]
        outcome = core.executor.execute(plan)
        core.commit(outcome)
        core.take_deltas()
        finished = self._end(plan, outcome)
        return {"step": number, **self._did(plan, finished), **self._state(chunked)}

    def _arrive(self, entry: Trace) -> None:
        pool = self.config["max_total_num_tokens"]
        longest = min(self.config["context_len"], pool) - 1
        length = len(entry["prompt"])
        if length >= longest - 5:
            entry = {**entry, "prompt": [0], "max_tokens": 1, "too_long": True}
            self.doomed.add(entry["id"])
        else:
            paged = -(-length // self.page) * self.page
            most = min(longest - length - 1, pool - paged - self.page - 1)
            entry = {**entry, "max_tokens": max(1, min(entry["max_tokens"], most))}
        queued = list(self.core.waiting)
        try:
            submit(self.core, {**entry, "output": None}, self.config)
        except QueueFull:
            self.results[entry["id"]] = {"reason": "abort", "output_len": 0, "cached_tokens": 0, "retractions": 0}
            self.aborted.append(entry["id"])
        for request in queued:
            if request.finished:
                self._ended(request, "abort")

    def _abort(self, prefix: str) -> None:
        scheduler: Any = self.core.scheduler
        for request in list(self.core.requests.values()):
            if not request.id.startswith(prefix):
                continue
            if request.state is State.RUNNING and request is not scheduler.chunked:
                self.doomed.add(request.id)
            else:
                self.core.abort(request.id)
                self._ended(request, "abort")

    def _end(self, plan: Plan, outcome: Outcome) -> list[str]:
        finished = []
        for request in outcome.finished:
            if request.id not in self.doomed:
                finished.append(request.id)
                self._ended(request, str(request.finish))
        for request, samples in zip(plan.requests, plan.samples, strict=True):
            if samples and request.id in self.doomed:
                self.core.abort(request.id)
                self._ended(request, "abort")
        return finished

    def _ended(self, request: Request, reason: str) -> None:
        self.results[request.id] = {
            "reason": reason,
            "output_len": request.num_output,
            "cached_tokens": request.cached_tokens,
            "retractions": request.preemptions,
        }
        if reason == "abort":
            self.aborted.append(request.id)

    def _did(self, plan: Plan, finished: list[str]) -> dict[str, Any]:
        rows = list(zip(plan.requests, plan.starts, plan.counts, strict=True))
        preempted = [request.id for request in plan.preempted]
        extends = plan.mode in ("extend", "mixed")
        prefills = rows[: len(rows) - self._riders(plan)] if extends else []
        ended = [*finished, *self.aborted]
        return {
            "mode": plan.mode,
            "batch": [[request.id, count] for request, _, count in rows],
            "prefix_len": {request.id: start for request, start, _ in prefills},
            "admitted": [request.id for request in plan.admitted],
            "retracted": [name for name in preempted if plan.waits[name][0] is not Why.RUN_SLOTS],
            "preempted": [name for name in preempted if plan.waits[name][0] is Why.RUN_SLOTS],
            "aborted": self.aborted,
            "finished": finished,
            "reasons": {name: self.results[name]["reason"] for name in ended},
        }

    def _riders(self, plan: Plan) -> int:
        """Rows at the end that decode in a prefill batch: all that had generated something before it."""
        if plan.mode != "mixed":
            return 0
        return sum(request.prefill_target <= start for request, start in zip(plan.requests, plan.starts, strict=True))

    def _state(self, chunked: Request | None) -> dict[str, Any]:
        core: EngineCore = self.core
        scheduler: Any = core.scheduler
        tree: Any = core.kv.tree  # type: ignore[attr-defined]
        going_on = [*scheduler.batch, *scheduler.last]
        return {
            "chunked": None if scheduler.chunked is None else scheduler.chunked.id,
            "available": core.pool.num_free * self.page,
            "evictable": tree.evictable * self.page,
            "protected": tree.protected * self.page,
            "new_token_ratio": scheduler.new_token_ratio,
            "batch_is_full": scheduler.full,
            "running": [r.id for r in going_on if r.state is State.RUNNING and r is not scheduler.chunked],
            "waiting": [request.id for request in core.waiting],
        }
