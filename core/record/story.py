"""The story of one request, from a record: why it waited, what was computed, who took its pages, what was cached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.cache_explain import WORDS
from engine.core.errors import EngineError
from engine.core.plan import Why
from engine.core.record.lines import Abort, Add, AnyLine, Commit, End, Flush, Plan, Ready, Weights
from engine.core.record.pages import digests_of
from engine.core.record.reading import DecisionLog

Beginning = Callable[[int], object]
"""What stands for a request's first so many tokens, to be compared with others'; ``None``: they are not known."""

MISSES = {
    **WORDS,
    "unread": "the request was told not to read the cache",
    "never": "no request that is remembered here had computed it",
    "evicted": "it had been computed, and evicted",
}
"""Why the page behind what was found was not found, in words."""


@dataclass(frozen=True, slots=True)
class Player:
    """A request and what is known of it."""

    add: Add
    end: End | None
    beginning: Beginning


@dataclass(frozen=True, slots=True)
class Part:
    """What is remembered of one request.

    Attributes:
        player: the request.
        lines: what happened from its coming to its end, spelled out.
        others: requests that came before it.
        emptied: when the cache was emptied, and whether by other weights.
        config: of the log.
        torn: it came before what is remembered.
    """

    player: Player
    lines: Sequence[AnyLine]
    others: Sequence[Player]
    emptied: Sequence[tuple[float, bool]]
    config: Mapping[str, Any]
    torn: bool = False


def find(log: DecisionLog, request: str) -> Part:
    """A request of a log, by its id or its number. Raises ``EngineError``: it is not in it."""
    number = next((add.n for add in log.adds.values() if add.id == request), None)
    if number is None and request.isdigit() and int(request) in log.adds:
        number = int(request)
    if number is None:
        raise EngineError(f"there is no request {request!r} in this log")
    players = {n: Player(add, log.ends.get(n), _digested(log, n)) for n, add in log.adds.items() if n <= number}
    return Part(
        players.pop(number),
        list(_between(log.lines, number)),
        list(players.values()),
        emptied(log.lines),
        log.header.config,
        log.adds[number].before is not None,
    )


def emptied(lines: Iterable[AnyLine]) -> list[tuple[float, bool]]:
    """When the cache was emptied, and whether by other weights."""
    return [(line.t, isinstance(line, Weights)) for line in lines if isinstance(line, Flush | Weights)]


def _digested(log: DecisionLog, n: int) -> Beginning:
    group, end = log.header.group, log.ends.get(n)

    def beginning(tokens: int) -> object:
        digests = [*digests_of(log.adds[n].pages), *(digests_of(end.pages) if end is not None else ())]
        wanted = tokens // group
        return tuple(digests[:wanted]) if len(digests) >= wanted else None

    return beginning


def _between(lines: Sequence[AnyLine], n: int) -> Iterable[AnyLine]:
    inside = False
    for line in lines:
        if isinstance(line, Add) and line.n == n:
            inside = True
        if inside:
            yield line
        if isinstance(line, End) and line.n == n:
            return


@dataclass(slots=True)
class Stretch:
    """Steps in a row in which a request waited for the same reason.

    Attributes:
        positions: its first and last place in the queue; 0: behind those that are told.
        queue: how many waited, at the first and at the last.
    """

    why: str
    words: str
    first: int
    last: int
    since: float
    until: float
    positions: list[int]
    queue: list[int]

    def plain(self, began: float) -> dict[str, Any]:
        """As values; seconds from the request's arrival."""
        return {
            "why": self.why,
            "words": self.words,
            "steps": [self.first, self.last],
            "seconds": [self.since - began, self.until - began],
            "position": [place or None for place in self.positions],
            "queue": self.queue,
        }


@dataclass(slots=True)
class Teller:
    """Goes through a request's lines and keeps what happened to it."""

    n: int
    budget: int
    parked: set[str]
    state: str = "waiting"
    place: int = 0  # tokens computed or planned
    waits: list[Stretch] = field(default_factory=list)
    work: list[dict[str, Any]] = field(default_factory=list)
    preemptions: list[dict[str, Any]] = field(default_factory=list)
    hits: list[dict[str, Any]] = field(default_factory=list)

    def hear(self, line: AnyLine) -> None:
        """The next line. Mutates."""
        match line:
            case Ready() if line.n == self.n:
                self.parked.discard(line.what)
            case Plan():
                self._plan(line)

    def _plan(self, plan: Plan) -> None:
        if self.waits and self.waits[-1].last == plan.step - 1:
            self.waits[-1].until = plan.t
        waits = {n: (why, words) for n, why, words in plan.waits}
        if self.n in plan.preempted:
            cause, words = waits.get(self.n, ("", "preempted"))
            self.preemptions.append({"step": plan.step, "t": plan.t, "why": cause, "words": words, "lost": self.place})
            self.state, self.place = "waiting", 0
        hit = next((hit for n, hit in plan.admitted if n == self.n), None)
        if hit is not None:
            self.state, self.place = "running", max(hit, 0)
            self.hits.append({"step": plan.step, "t": plan.t, "tokens": self.place})
        rows = plan.rows or []
        if self.n in rows:
            self._computed(plan, plan.each[rows.index(self.n)])
        elif (why := self._why(plan, waits)) is not None:
            self._waited(plan, *why)

    def _why(self, plan: Plan, waits: Mapping[int, tuple[str, str]]) -> tuple[str, str] | None:
        if self.parked:
            return Why.PARKED.value, ", ".join(sorted(self.parked))
        if self.n in waits:
            return waits[self.n]
        if self.state == "waiting":
            return plan.rest, ""
        if sum(plan.each) >= self.budget:
            return Why.TOKEN_BUDGET.value, ""
        return (Why.PREEMPTION.value, "") if plan.preempted else None

    def _waited(self, plan: Plan, why: str, words: str) -> None:
        place = plan.queue.index(self.n, 1) if self.n in plan.queue[1:] else 0
        length, last = plan.queue[0] if plan.queue else 0, self.waits[-1] if self.waits else None
        if last is not None and (last.why, last.words, last.last) == (why, words, plan.step - 1):
            last.last, last.until = plan.step, plan.t
            last.positions[1], last.queue[1] = place, length
        else:
            stretch = Stretch(why, words, plan.step, plan.step, plan.t, plan.t, [place, place], [length, length])
            self.waits.append(stretch)

    def _computed(self, plan: Plan, count: int) -> None:
        last = self.work[-1] if self.work else None
        cut = next((why for n, why in plan.cuts if n == self.n), None)
        if count == 1 and last is not None and last["steps"][1] == plan.step - 1 and last["each"] == 1 and cut is None:
            last["steps"][1] = plan.step
            last["tokens"] += 1
        else:
            self.work.append(
                {"steps": [plan.step, plan.step], "from": self.place, "tokens": count, "each": count, "cut": cut}
            )
        self.place += count


def tell(part: Part) -> dict[str, Any]:
    """The story as plain values. Seconds count from the request's arrival."""
    add, end = part.player.add, part.player.end
    began = add.t if add.arrival is None else add.arrival
    teller = Teller(add.n, part.config["limits"]["max_batch_tokens"], set(add.parked))
    if add.before is not None and add.before[0]:
        teller.state, teller.place = add.before[0], add.before[2]
    for line in part.lines:
        teller.hear(line)
    for told in (*teller.preemptions, *teller.hits):
        told["seconds"] = told.pop("t") - began
    finished = end is not None and bool(end.finish)
    return {
        "id": add.id,
        "number": add.n,
        "prompt_tokens": add.prompt,
        "priority": add.priority,
        "tenant": add.metadata.get("tenant"),
        "deadline": add.deadline,
        "began": not part.torn,
        "finish": end.finish if end is not None and finished else None,
        "detail": next((line.detail for line in part.lines if isinstance(line, Abort) and line.n == add.n), None),
        "output_tokens": end.output if end is not None else None,
        "first_started": None if end is None or end.started is None else end.started - began,
        "first_token": _first_token(part.lines, add.n, began),
        "ended": end.t - began if end is not None and finished else None,
        "waits": [stretch.plain(began) for stretch in teller.waits],
        "work": teller.work,
        "preemptions": teller.preemptions,
        "cached": _cached(part, teller.hits),
    }


def _first_token(lines: Sequence[AnyLine], n: int, began: float) -> float | None:
    plans: dict[int, Plan] = {}
    for line in lines:
        if isinstance(line, Plan):
            plans[line.step] = line
        elif isinstance(line, Commit) and (plan := plans.pop(line.step, None)) is not None and n in (plan.rows or ()):
            row = (plan.rows or []).index(n)
            count = int(row not in plan.partial) if line.tokens is None else line.tokens[row]
            if count and row not in line.dropped and row not in line.errors:
                return line.t - began
    return None


def _cached(part: Part, hits: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the prefix cache gave at each start, and why not one page more at the first; ``None``: it never started."""
    if not hits:
        return None
    missing = None
    if not part.torn:
        missing = first_miss(part, hits[0]["tokens"], hits[0]["seconds"])
    return {"starts": list(hits), "tokens": hits[0]["tokens"], "missing": missing}


def first_miss(part: Part, hit: int, seconds: float) -> dict[str, Any]:
    """Why a request that found ``hit`` tokens, so many seconds after its arrival, did not find one page more."""
    add, size = part.player.add, part.config["limits"]["page_size"]
    start, end = hit, min(hit + size, add.prompt)
    why = _missed(part, hit, seconds + (add.t if add.arrival is None else add.arrival))
    return {"page": hit // size, "tokens": [start, end], "why": why, "words": MISSES[why]}


def _missed(part: Part, hit: int, now: float) -> str:
    add, size = part.player.add, part.config["limits"]["page_size"]
    if hit >= (add.prompt - 1) // size * size:
        return "last"
    if not part.config["kvcache"]["options"].get("enable_prefix_caching", True):
        return "off"
    if not add.read:
        return "unread"
    wanted = part.player.beginning(hit + size)
    same = [one for one in part.others if one.add.write and wanted is not None and one.beginning(hit + size) == wanted]
    own = [one for one in same if (one.add.salt, one.add.adapter) == (add.salt, add.adapter)]
    begun = [one for one in own if one.end is not None and one.end.started is not None and one.end.started <= now]
    if any(one.end is not None and (not one.end.finish or one.end.t > now) for one in begun):
        return "computing"
    if begun:
        last = max(one.end.t for one in begun if one.end is not None)
        later = [by_weights for when, by_weights in part.emptied if last <= when <= now]
        return "evicted" if not later else "weights" if later[-1] else "flushed"
    return "salt" if any(one not in own for one in same) else "never"
