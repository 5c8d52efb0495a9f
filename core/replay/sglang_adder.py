"""Level adder: the admission ledger, call by call. The ledger is the ``radix`` scheduler's (``ledger_type``).

Files of kind *direct* have a real cache and pool: candidates that are let in are pinned but get no pages, as recorded.
Files of kind *loop* list the calls of a whole run by their numbers alone; there the state of the pool is given, and of
a preemption only the effect is decided, since the priorities of those that ran are not in the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.core.plan import Room, Why
from engine.core.replay.report import Divergence, Report
from engine.core.replay.sglang_model import UNBOUNDED, core_of, namespace, priority_of, remember
from engine.core.request import Request, SamplingParams

Trace = Mapping[str, Any]
TOLERANCE = 1e-5  # tokens: the recorded ratio has nine digits
VERDICTS = {None: "CONTINUE", Why.RESERVE: "NO_TOKEN", Why.PREFILL_BUDGET: "OTHER"}
BUDGETS = ("rem_total", "cur_rem", "rem_input", "rem_chunk", "available", "evictable")


def replay(data: Trace) -> Report:
    """Make the calls anew and compare each; stops at the first difference. Steps are calls, each round's start one."""
    player: Player = Direct(data) if data["kind"] == "direct" else FromNumbers(data)
    steps = 0
    try:
        for number, entry in enumerate(data["rounds"]):
            player.open(entry)
            for recorded, decided in player.calls(entry):
                decided = {name: _like(value, recorded[name]) for name, value in decided.items()}
                if decided != recorded:
                    where = {"round": number}
                    divergence = Divergence(steps, {**where, **recorded}, {**where, **decided})
                    return Report(data["name"], steps, divergence)
                steps += 1
    finally:
        player.core.close()
    return Report(data["name"], steps)


def _like(decided: Any, recorded: Any) -> Any:
    """The recorded number, where the decided one is it but for the digits that the recording left out."""
    if isinstance(decided, float) and isinstance(recorded, int | float) and abs(decided - recorded) < TOLERANCE:
        return recorded
    return decided


class Player(ABC):
    """A ledger, opened anew each round, and the calls on it."""

    def __init__(self, data: Trace) -> None:
        self.config = data["config"]
        self.core = core_of(self.config, {}, pages=self.config["max_total_num_tokens"] // self.config["page_size"])
        self.ledger: Any = None
        self.running: list[Request] = []

    def open(self, entry: Trace) -> None:
        """A round begins."""
        scheduler: Any = self.core.scheduler
        args = entry["args"]
        self.ledger = scheduler.ledger_type(
            page_size=self.config["page_size"],
            pool_tokens=UNBOUNDED,  # the recorded max_tokens are clipped already
            available=lambda: sum(self.pool_tokens()),
            running=self.running,
            ratio=args["new_token_ratio"],
            input_tokens=args["max_prefill_tokens"],
            chunk_tokens=args["chunk_tokens"],
            riders=args["mixed_decode_tokens"],
            max_requests=args["prefill_max_requests"],
            simulate=self.config["disable_radix_cache"],
        )

    @abstractmethod
    def pool_tokens(self) -> tuple[int, int]:
        """Free and evictable tokens."""

    def budgets(self) -> dict[str, Any]:
        """The state of the books."""
        ledger = self.ledger
        available, evictable = self.pool_tokens()
        values = (ledger.total.remaining, ledger.current.remaining, ledger.input_left, ledger.chunk_left)
        return dict(zip(BUDGETS, (*values, available, evictable), strict=True))

    def calls(self, entry: Trace) -> Iterator[tuple[Trace, Trace]]:
        """Each call's recorded and decided result."""
        yield entry["init"], self.budgets()
        for call in entry["calls"]:
            decided = getattr(self, call["call"])(entry, call)
            decided = {**call, **decided, **self.budgets()}
            yield call, decided

    def offer(self, request: Request, room: Room) -> tuple[dict[str, Any], int]:
        """Decide a candidate and book it; what the call came to, and the tokens."""
        answer = self.ledger.decide(request, room)
        if isinstance(answer, Why):
            return {"result": VERDICTS[answer], "added": False, "extend": None, "chunked": False}, 0
        whole = answer == room.owed
        self.ledger.charge(request, answer, whole=whole)
        return {"added": True, "extend": [room.hit, room.hit + answer], "chunked": not whole}, answer

    def verdict(self) -> str:
        """The state of the batch after a candidate was added."""
        return VERDICTS[self.ledger.closed()]


class Direct(Player):
    """Plays on a real cache and pool."""

    def __init__(self, data: Trace) -> None:
        super().__init__(data)
        self.kv = self.core.kv
        self.candidates: dict[str, Request] = {}
        self.entries = 0
        for op in data["setup"]:
            if op["op"] == "cache":
                remember(self.core, op)
            else:
                self.running.append(self._run(op))

    def open(self, entry: Trace) -> None:
        """A round begins with its candidates."""
        super().open(entry)
        for candidate in entry["candidates"]:
            request = self._request(candidate, candidate.get("output") or [])
            if candidate.get("matched_before"):
                request.sched_state = self.kv.match(request).tokens
            self.candidates[request.id] = request

    def pool_tokens(self) -> tuple[int, int]:
        """Free and evictable tokens."""
        numbers = self.kv.numbers()
        return numbers.free * numbers.page_size, numbers.evictable * numbers.page_size

    def add(self, entry: Trace, call: Trace) -> dict[str, Any]:
        """Look up, decide, pin."""
        request = self.candidates[call["id"]]
        match = self.kv.match(request)
        numbers = self.kv.numbers()
        owed = request.num_tokens - match.tokens
        room = Room(match.tokens, owed, numbers.available, match.idle, numbers.page_size)
        result, tokens = self.offer(request, room)
        if tokens:
            self.kv.adopt(request, match)
            result["result"] = self.verdict()
        lengths = {"seq_len": request.num_tokens, "prefix_len": match.tokens, "output_len": request.num_output}
        return {**result, **lengths}

    def preempt(self, entry: Trace, call: Trace) -> dict[str, Any]:
        """Choose victims, and let them go."""
        request = self.candidates[call["id"]]
        known = request.sched_state is not None
        owed = request.num_tokens - request.sched_state if known else 0
        victims = self.ledger.victims(request, owed, self.config["priority_scheduling_preemption_threshold"])
        for victim in victims:
            self.ledger.forgive(victim)
            self.running.remove(victim)
            self.kv.release(victim, keep=0)
        return {
            "result": bool(victims),
            "victims": [victim.id for victim in victims],
            "running_after": [r.id for r in self.running],
            "seq_len": request.num_tokens if known else 0,
            "prefix_len": request.sched_state if known else 0,
        }

    def _request(self, entry: Trace, output: Sequence[int]) -> Request:
        self.entries += 1
        prompt = entry["prompt"]
        return Request(
            id=entry["id"],
            tokens=[*prompt, *output],
            num_prompt=len(prompt),
            params=SamplingParams(ignore_eos=bool(entry.get("ignore_eos"))),
            max_total=len(prompt) + entry["max_tokens"],
            priority=priority_of(entry, self.config),
            entry_index=self.entries,
            namespace=namespace(entry),
        )

    def _run(self, op: Trace) -> Request:
        """A request that was prefilled, and then decoded until it had its outputs (the last has no KV yet)."""
        kv = self.kv
        request = self._request(op, ())
        request.prefill_target = request.num_prompt
        request.pages = kv.adopt(request, kv.match(request))
        request.pages += kv.take(request, kv.short(request, request.num_prompt))
        request.pages = kv.publish(request, request.num_prompt).pages or request.pages
        computed = request.num_prompt + op["outputs"] - 1
        request.pages += kv.take(request, kv.short(request, computed))
        request.tokens += [UNBOUNDED] * op["outputs"]
        return request


class FromNumbers(Player):
    """Plays on recorded states of the pool."""

    def __init__(self, data: Trace) -> None:
        super().__init__(data)
        self.state = (0, 0)
        self.prompts: dict[str, int] = {}

    def open(self, entry: Trace) -> None:
        """A round begins with those that run."""
        self.state = (entry["init"]["available"], entry["init"]["evictable"])
        self.running = [
            self._request(name, self.prompts[name] + output, output, max_tokens)
            for name, max_tokens, output in entry["running"]
        ]
        super().open(entry)

    def pool_tokens(self) -> tuple[int, int]:
        """As recorded after the last call."""
        return self.state

    def add(self, entry: Trace, call: Trace) -> dict[str, Any]:
        """A candidate. How much of its prefix a pin takes is known where it was pinned; else it may be all or none."""
        request = self._seen(call)
        hit, size = call["prefix_len"], self.config["page_size"]
        idle = self.state[1] - call["evictable"] if call["added"] else hit
        room = Room(hit, call["seq_len"] - hit, sum(self.state) // size, idle // size, size)
        if not call["added"] and VERDICTS.get(self.ledger.decide(request, room)) != call["result"]:
            room = room._replace(idle=0)
        result, tokens = self.offer(request, room)
        self.state = (call["available"], call["evictable"])
        return {**result, "result": self.verdict()} if tokens else result

    def add_chunked(self, entry: Trace, call: Trace) -> dict[str, Any]:
        """The prompt in progress."""
        request = self._seen(call)
        owed = call["seq_len"] - call["prefix_len"]
        tokens = self.ledger.chunk(owed)
        whole = tokens == owed
        self.ledger.charge(request, tokens, whole=whole)
        extend = [call["prefix_len"], call["prefix_len"] + tokens]
        return {"result": "LAST" if whole else "MORE", "extend": extend, "chunked": not whole, "added": True}

    def preempt(self, entry: Trace, call: Trace) -> dict[str, Any]:
        """The recorded victims go."""
        for victim in [request for request in self.running if request.id in call["victims"]]:
            self.ledger.forgive(victim)
            self.running.remove(victim)
        self.state = (call["available"], call["evictable"])
        return {"running_after": [request.id for request in self.running]}

    def _seen(self, call: Trace) -> Request:
        self.prompts[call["id"]] = call["seq_len"] - call["output_len"]
        return self._request(call["id"], call["seq_len"], call["output_len"], call["max_tokens"])

    def _request(self, name: str, length: int, output: int, max_tokens: int) -> Request:
        return Request(
            id=name,
            tokens=[0] * length,
            num_prompt=length - output,
            params=SamplingParams(ignore_eos=self.config["disable_radix_cache"]),
            max_total=length - output + max_tokens,
        )
