"""Recordings of our own runs: what was asked of an engine core, what the model answered, what was decided.

A recording is a JSON object: ``config`` (limits, plugins by name with their options, loop), and ``events`` in order:
``add``, ``ready``, ``abort``, ``expire``, ``plan`` (what was decided), ``commit`` (the tokens that the model gave),
``fail`` and ``idle``. Replaying it asks the same of a new core and compares every plan: any plugins, both loop modes.

What a request carries for policies (``metadata``) is recorded as far as JSON brings it back; the rest is named in
``left_out``. Policies that read the clock decide by another one when they are replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from engine.core.errors import ConfigError, PluginError
from engine.core.grammar_desk import GRAMMAR
from engine.core.loop import EngineCore
from engine.core.plan import Outcome, Plan
from engine.core.pooling import Pooling, Vector
from engine.core.protocols import Limits, ModelInfo, Policy
from engine.core.registry import make
from engine.core.replay.cores import core_for
from engine.core.replay.report import Divergence, NotReplayable, Report
from engine.core.request import Finish, Request, SamplingParams

FORMAT = "sixhooks-decisions-1"


class RecordingCore(EngineCore):
    """An engine core that keeps a recording of all that it is asked and all that it decides.

    Example::

        core = assemble(EngineConfig(model="..."), core=RecordingCore)
        ...                                     # add, step
        json.dump(core.recording("evening"), file)
    """

    def __init__(self, **parts: Any) -> None:
        self._events: list[dict[str, Any]] = []
        self._policies = tuple(parts.get("policies", ()))
        super().__init__(**parts)
        self._loaded_as = self.model.fingerprint

    def recording(self, name: str) -> dict[str, Any]:
        """The recording so far, as plain values."""
        return {
            "format": FORMAT,
            "name": name,
            "config": {
                "limits": asdict(self.limits),
                "eos_ids": sorted(self.model.eos_ids),
                "fingerprint": self._loaded_as,
                "scheduler": _selection(self.scheduler),
                "kvcache": _selection(self.kv),
                "policies": [_selection(policy) for policy in self._policies],
                "overlap": self.flight.overlap,
            },
            "events": list(self._events),
        }

    def add(self, tokens: Sequence[int], params: SamplingParams | None = None, **more: Any) -> Request:
        """As ``EngineCore.add``; recorded if it is accepted."""
        parked_on = more["parked_on"] = tuple(more.get("parked_on", ()))
        request = super().add(tokens, params, **more)
        self._events.append({"add": _entry(request, more.get("salt", ""), parked_on)})
        return request

    def plan(self) -> Plan:
        """As ``EngineCore.plan``, recorded."""
        plan = super().plan()
        self._events.append({"plan": decided(self, plan)})
        return plan

    def commit(self, outcome: Outcome) -> None:
        """As ``EngineCore.commit``; the tokens are recorded."""
        event = {
            "tokens": [list(tokens) for tokens in outcome.tokens],
            "errors": {str(row): words for row, words in outcome.errors.items()},
            "proposals": {str(row): list(drafts) for row, drafts in outcome.proposals.items()},
        }
        self._events.append({"commit": {key: value for key, value in event.items() if value}})
        super().commit(outcome)

    def fail_step(self, plan: Plan, why: str) -> None:
        """As ``EngineCore.fail_step``, recorded."""
        self._events.append({"fail": why})
        super().fail_step(plan, why)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: str | None = None) -> bool:
        """As ``EngineCore.abort``, recorded."""
        self._events.append({"abort": [request_id, finish.value]})
        return super().abort(request_id, finish, detail)

    def expire(self, now: float) -> None:
        """As ``EngineCore.expire``, recorded."""
        self._events.append({"expire": now})
        super().expire(now)

    def idle(self) -> None:
        """As ``EngineCore.idle``, recorded."""
        self._events.append({"idle": True})
        super().idle()

    def rename_model(self, fingerprint: str) -> None:
        """As ``EngineCore.rename_model``, recorded."""
        self._events.append({"weights": fingerprint})
        super().rename_model(fingerprint)

    def ready(self, request_id: str, what: str) -> None:
        """As ``EngineCore.ready``, recorded."""
        self._events.append({"ready": [request_id, what]})
        super().ready(request_id, what)


def decided(core: EngineCore, plan: Plan) -> dict[str, Any]:
    """What a plan decided, as plain values, with the queue and the pool as they are after it."""
    return {
        "step": plan.index,
        "rows": [[r.id, s, c] for r, s, c in zip(plan.requests, plan.starts, plan.counts, strict=True)],
        "pages": [list(table) for table in plan.tables],
        "drafts": {request.id: list(drafts) for request, drafts in plan.drafts.items()},
        "admitted": [request.id for request in plan.admitted],
        "preempted": [request.id for request in plan.preempted],
        "evicted_pages": plan.evicted_pages,
        "waits": {name: [why.value, words] for name, (why, words) in plan.waits.items()},
        "cuts": {name: why.value for name, why in plan.cuts.items()},
        "running": [request.id for request in core.running],
        "waiting": [request.id for request in core.waiting],
        "available": core.kv.numbers().available,
    }


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether the data are such a recording, told by their content."""
    return data.get("format") == FORMAT


def replay(data: Mapping[str, Any], policies: Sequence[Policy] | None = None) -> Report:
    """Ask the same of a new core and compare each plan; stops at the first difference.

    Args:
        policies: with these; default: those of the recording, by their names and options.

    Raises:
        NotReplayable: a policy of the recording is not installed under its name.
    """
    core = _core(data["config"], _recorded(data["config"]) if policies is None else policies)
    plans: list[Plan] = []
    steps = 0
    try:
        for event in data["events"]:
            [(kind, what)] = event.items()
            if kind != "plan":
                _apply(core, kind, what, plans)
                continue
            plan = core.plan()
            plans.append(plan)
            now = decided(core, plan)
            if now != what:
                return Report(data["name"], steps, Divergence(what["step"], what, now))
            steps += 1
    finally:
        core.close()
    return Report(data["name"], steps)


def left_out(data: Mapping[str, Any]) -> list[str]:
    """Names in the requests' metadata whose values could not be recorded."""
    return sorted({name for event in data["events"] for name in event.get("add", {}).get("left_out", ())})


def _recorded(config: Mapping[str, Any]) -> list[Policy]:
    """The policies of a recording, made anew. Raises ``NotReplayable``."""
    made: list[Policy] = []
    for one in config.get("policies", ()):
        try:
            policy = make("policy", one["name"], one["options"])
        except (ConfigError, PluginError) as error:
            raise NotReplayable(f"it was recorded with a policy that cannot be made: {error}") from error
        assert isinstance(policy, Policy)
        made.append(policy)
    return made


def _core(config: Mapping[str, Any], policies: Sequence[Policy]) -> EngineCore:
    limits = Limits(**config["limits"])
    model = ModelInfo(
        name="recorded",
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        eos_ids=frozenset(config["eos_ids"]),
        fingerprint=config["fingerprint"],
    )
    scheduler, kv = config["scheduler"], config["kvcache"]
    return core_for(
        limits,
        (scheduler["name"], scheduler["options"]),
        (kv["name"], kv["options"]),
        model=model,
        policies=policies,
        overlap=config["overlap"],
    )


def _apply(core: EngineCore, kind: str, what: Any, plans: list[Plan]) -> None:
    if kind == "add":
        params = SamplingParams(**_frozen(what["params"]))
        pooling = Pooling(**what["pooling"]) if "pooling" in what else None
        core.add(what["tokens"], params, **what["more"], pooling=pooling)
    elif kind == "commit":
        errors = {int(row): words for row, words in what.get("errors", {}).items()}
        proposals = {int(row): tuple(drafts) for row, drafts in what.get("proposals", {}).items()}
        plan, tokens = plans.pop(0), [tuple(tokens) for tokens in what.get("tokens", ())]
        core.commit(Outcome(plan, tokens, errors, proposals, pooled=_some_vectors(plan)))
        core.take_deltas()
    elif kind == "fail":
        core.fail_step(plans[0], what)
        plans.clear()
    elif kind == "idle":
        core.idle()
    elif kind == "expire":
        core.expire(what)
    elif kind == "weights":
        core.rename_model(what)
    elif kind == "abort":
        core.abort(what[0], Finish(what[1]))
    else:
        core.ready(*what)


def _some_vectors(plan: Plan) -> dict[int, Vector]:
    """What was computed for those that pool decides nothing, and was not recorded."""
    rows = zip(plan.requests, plan.starts, plan.counts, strict=True)
    return {
        row: np.zeros(1, np.float32)
        for row, (request, start, count) in enumerate(rows)
        if request.pooling is not None and request.pooling.expects(start + count, request.num_prompt)
    }


def _entry(request: Request, salt: str, parked_on: Sequence[str]) -> dict[str, Any]:
    """What was added, as plain values: arguments of ``EngineCore.add``. Of a grammar only that it was waited for."""
    params, metadata = request.params, {k: v for k, v in request.metadata.items() if _is_json(v)}
    lost = sorted(request.metadata.keys() - metadata.keys())
    return {
        **({"left_out": lost} if lost else {}),
        "tokens": list(request.prompt),
        "params": {**asdict(params), "grammar": None},
        **({} if request.pooling is None else {"pooling": asdict(request.pooling)}),
        "more": {
            "request_id": request.id,
            "priority": request.priority,
            "salt": salt,
            "adapter": request.adapter,
            "arrival": request.arrival,
            "read_cache": request.read_cache,
            "write_cache": request.write_cache,
            **({} if request.cache_ttl is None else {"cache_ttl": request.cache_ttl}),
            "metadata": metadata,
            "parked_on": [*parked_on, *([] if params.grammar is None else [GRAMMAR])],
        },
    }


def _is_json(value: Any) -> bool:
    """Whether JSON brings it back as it was."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as they were before JSON made lists of tuples and text of integer keys."""
    frozen: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in values.items()}
    if bias := frozen.get("logit_bias"):
        frozen["logit_bias"] = {int(token): value for token, value in bias.items()}
    return frozen


def _selection(plugin: Any) -> dict[str, Any]:
    return {"name": plugin.name, "options": plugin.options.model_dump(mode="json")}
