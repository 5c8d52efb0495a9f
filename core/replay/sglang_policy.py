"""Level policy: passes of the queue order. The queue, the look-ups and the order are those of a real core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.replay.report import Divergence, Report
from engine.core.replay.sglang_model import core_of, remember, submit
from engine.core.request import Request, SamplingParams, State
from engine.core.step import Step

Trace = Mapping[str, Any]
PAGES = 50_000


def replay(data: Trace) -> Report:
    """Do the operations anew and compare each pass; stops at the first difference."""
    player = Player(data)
    try:
        for number, op in enumerate(data["ops"]):
            decided = player.play(op)
            if "result" in op and decided != op["result"]:
                return Report(data["name"], number, Divergence(number, op["result"], decided))
    finally:
        player.close()
    return Report(data["name"], len(data["ops"]))


class Player:
    """Plays the operations on a core that never runs a step."""

    def __init__(self, data: Trace) -> None:
        self.config = data["config"]
        self.core = core_of(self.config, {"policy": self.config["schedule_policy"]}, pages=PAGES)
        self.passes = 0

    def play(self, op: Trace) -> dict[str, Any]:
        """One operation; what a pass came to, in the recording's terms."""
        core, kind = self.core, op["op"]
        if kind == "insert":
            remember(core, op)
        elif kind == "evict":
            need = -(-op["n"] // core.pool.page_size)
            core.kv.drop(core.kv.victims(need), need)
        elif kind == "enqueue":
            submit(core, op, self.config)
        elif kind == "dequeue":
            for name in op["ids"]:
                core.abort(name)
        elif kind == "running":
            core.roster.running = [_running(key) for key in op["routing_keys"]]
        else:
            return self._order(cache_aware="matched" in op["result"])
        return {}

    def close(self) -> None:
        """End what is left."""
        self.core.roster.running = []
        self.core.close()

    def _order(self, *, cache_aware: bool) -> dict[str, Any]:
        self.passes += 1
        self.core.arbiter.forget_step()
        step = Step(self.core, self.passes)
        ordered = self.core.arbiter.order(step)
        queue_order: Any = self.core.scheduler.queue_order  # type: ignore[attr-defined]
        decided: dict[str, Any] = {
            "order": [request.id for request in ordered],
            "active_policy": queue_order.active,
        }
        if cache_aware:
            lengths = {request: step.prefix(request).tokens for request in ordered}
            decided["matched"] = {r.id: [length, min(length, r.num_tokens - 1)] for r, length in lengths.items()}
            decided["deprioritized"] = sorted(request.id for request in queue_order.postponed)
        return decided


def _running(key: str | None) -> Request:
    metadata = {} if key is None else {"routing_key": key}
    return Request(
        id="", tokens=[0], num_prompt=1, params=SamplingParams(), max_total=2, metadata=metadata, state=State.RUNNING
    )
