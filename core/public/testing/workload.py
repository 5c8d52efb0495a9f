"""A hostile workload: shared prefixes, namespaces, aborts, failures and late answers, and what must come of it.

The model's tokens depend on the request alone, so what each request must say is known beforehand, whatever the plugins
decide: it equals the text of a run without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from engine.core.errors import EngineError, InvalidRequest
from engine.core.loop import EngineCore
from engine.core.plan import Delta, Transfer
from engine.core.protocols import Connector
from engine.core.registry import make
from engine.core.request import Finish, Request, SamplingParams
from engine.testing.doubles import FaultyCache, FaultyConnector
from engine.testing.executors import ShadowExecutor
from engine.testing.guard import HookGuard, Violation, audit_pages
from engine.testing.making import make_core

VOCAB = 50
PAGES = {1: 60, 4: 24}
REST = 3000  # steps after the last request came within which everything must have ended
SCRIPTED = ("the step failed: RuntimeError: a scripted failure", "a scripted row failure")


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plugin is tried in: its counterparts, the loop, and who misbehaves."""

    scheduler: str = "unified"
    kvcache: str = "paged"
    page_size: int = 4
    overlap: bool = False
    drafts: bool = False  # the executor proposes drafts, some of them wrong
    faults: bool = False  # steps and rows fail, requests are aborted in all states
    flaky: bool = False  # the cache misses and forgets, a connector answers late, twice and by wrong names

    def __str__(self) -> str:
        traits = [name for name in ("overlap", "drafts", "faults", "flaky") if getattr(self, name)]
        return "-".join([self.scheduler, self.kvcache, f"page{self.page_size}", *traits])


def say(tokens: Sequence[int], num_prompt: int) -> int:
    """What the model says after these tokens."""
    return (tokens[-1] * 31 + len(tokens) * 7 + tokens[0] + num_prompt) % VOCAB


def expected(request: Request) -> tuple[list[int], Finish]:
    """What a request must say in the end, and how it must end, if nobody aborts it and nothing fails."""
    tokens = request.prompt
    while len(tokens) < request.max_total:
        tokens.append(say(tokens, request.num_prompt))
        if tokens[-1] in request.stop_ids:
            return tokens[request.num_prompt :], Finish.STOP
    return tokens[request.num_prompt :], Finish.LENGTH


class Workload:
    """Runs one workload to its end. ``run`` raises ``Violation`` (or what a plugin raised) where a rule is broken.

    Args:
        seed: of everything that is random.
        situation: where it runs.
        plugins: role -> the plugin to try, made by the caller (``policies``: a list).
        limits: arguments of ``make_core`` that the plugin needs otherwise.
        requests: how many there are.
    """

    def __init__(
        self,
        seed: int,
        situation: Situation,
        plugins: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        requests: int = 30,
    ) -> None:
        self.rng = random.Random(f"{seed} {situation}")
        self.situation = situation
        self.executor = ShadowExecutor(lambda request: say(request.tokens, request.num_prompt), vocab_size=VOCAB)
        if situation.drafts:
            self.executor.drafter = self._draft
        self.left = requests
        self.turns = 0
        self.seen: dict[str, Request] = {}
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, Delta] = {}
        self.aborted: set[str] = set()
        self.core = self._build(seed, dict(plugins or {}), limits or {})
        self.guard = HookGuard(self.core)

    def _build(self, seed: int, plugins: dict[str, Any], limits: Mapping[str, Any]) -> EngineCore:
        situation = self.situation
        connectors: list[Connector] = []
        if situation.flaky:
            connectors.append(FaultyConnector(seed=seed))
            if "kvcache" not in plugins:
                plugins["kvcache"] = FaultyCache(make("kvcache", situation.kvcache), seed=seed)  # type: ignore[arg-type]
        pages = PAGES[situation.page_size]
        settings: dict[str, Any] = {
            "scheduler": situation.scheduler, "kvcache": situation.kvcache, "connectors": connectors,
            "num_pages": pages, "page_size": situation.page_size, "max_model_len": pages * situation.page_size + 5,
            "max_batch_tokens": 24, "max_running": 6, "overlap": situation.overlap, "clock": lambda: self.turns / 1000,
        }  # fmt: skip
        return make_core(**{**settings, **limits, **plugins}, executor=self.executor)

    def run(self) -> dict[str, list[int]]:
        """All of it; returns what each request said."""
        with closing(self.core):
            return self._run()

    def _run(self) -> dict[str, list[int]]:
        try:
            while self.left > 0 or self.rng.random() < 0.5:
                self._turn()
            for name in list(self.core.parked):
                self.core.ready(name, "grammar")
            for _ in range(REST):
                if not self.core.has_work:
                    break
                self._step()
            self._judge()
        except EngineError as error:
            raise Violation(f"the engine stopped: {type(error).__name__}: {error}") from error
        return self.texts

    @property
    def decisions(self) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        """What each step computed: request ids and token counts."""
        return [(tuple(request.id for request in plan.requests), plan.counts) for plan in self.executor.plans]

    # ---- what happens

    def _turn(self) -> None:
        rng, live = self.rng, list(self.core.requests)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            self._add()
        if self.situation.faults and live:
            self._harm(rng.choice(live))
        if self.situation.flaky and rng.random() < 0.2:
            self._move()
        if self.core.parked and rng.random() < 0.3:
            self.core.ready(rng.choice(list(self.core.parked)), "grammar")
        if rng.random() < 0.03:
            self.core.kv.reset()
        self._step()

    def _add(self) -> None:
        rng = self.rng
        shared, own = rng.choice((0, 3, 8, 17, 30, 40)), rng.choice((0, 1, 4, 11))
        family = rng.randrange(2)
        prompt = [(family * 11 + at) % VOCAB for at in range(shared)] + [rng.randrange(VOCAB) for _ in range(own)]
        stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 2))))
        metadata = {"tenant": rng.choice("abc"), "deadline": self.turns / 1000 + rng.random()}
        self.left -= 1
        try:
            request = self.core.add(
                prompt,
                SamplingParams(max_tokens=rng.randrange(1, 25), stop_token_ids=stops, ignore_eos=True),
                salt=rng.choice(("", "", "", "s")),
                adapter=rng.choice(("", "", "", "lora")),
                priority=rng.choice((0, 0, 1, 5)),
                read_cache=rng.random() < 0.9,
                parked_on=["grammar"] if rng.random() < 0.1 else [],
                metadata=metadata,
            )
        except InvalidRequest:
            return  # the workload asks for impossible things too
        self.seen[request.id] = request
        self.texts[request.id] = []

    def _harm(self, name: str) -> None:
        roll = self.rng.random()
        if roll < 0.1:
            self.aborted.add(name)
            self.core.abort(name)
        elif roll < 0.15:
            self.executor.fail_next = 1
        elif roll < 0.25:
            self.executor.row_errors[name] = "a scripted row failure"

    def _move(self) -> None:
        running = self.core.running
        if running:
            request = self.rng.choice(running)
            pages = tuple(request.pages[: self.rng.randrange(1, 4)])
            self.core.transfer(Transfer(f"t{self.turns}", "push", request.id, pages))

    def _draft(self, request: Request) -> tuple[int, ...]:
        tokens = list(request.tokens)
        for _ in range(self.rng.randrange(4)):
            right = self.rng.random() < 0.7
            tokens.append(say(tokens, request.num_prompt) if right else self.rng.randrange(VOCAB))
        return tuple(tokens[request.num_tokens :])

    # ---- what must hold

    def _step(self) -> None:
        self.turns += 1
        for delta in self.core.step():
            if delta.request_id in self.ended:
                raise Violation(f"request {delta.request_id} goes on after its end")
            self.texts[delta.request_id].extend(delta.tokens)
            if delta.finish is not None:
                self.ended[delta.request_id] = delta
        if self.executor.mismatch is not None:
            raise Violation(self.executor.mismatch)
        for name, *_, words in self.core.hooks.faults():
            raise Violation(f"plugin {name!r} was at fault: {words}")
        audit_pages(self.core)

    def _judge(self) -> None:
        lost = set(self.seen) - set(self.ended)
        if self.core.has_work or lost:
            raise Violation(f"after {REST} more steps {len(lost)} requests have not ended, e.g. {sorted(lost)[:3]}")
        for name, request in self.seen.items():
            self._judge_one(request, self.texts[name], self.ended[name])
        numbers = self.core.kv.numbers()
        fenced = self.core.pool.num_fenced
        if numbers.pinned or numbers.free + numbers.evictable + fenced != numbers.total:
            raise Violation(f"nothing runs and pages are missing: {numbers}, {fenced} fenced")
        self.core.kv.reset()
        if self.core.pool.num_free + self.core.pool.num_fenced != numbers.total:
            raise Violation(f"after reset() {self.core.pool.num_free} of {numbers.total} pages are free")

    def _judge_one(self, request: Request, text: list[int], end: Delta) -> None:
        wanted, how = expected(request)
        detail = end.detail or ""
        if text != wanted[: len(text)]:
            raise Violation(
                f"{request!r} says {text[-8:]}, which is not what the model says: {wanted[: len(text)][-8:]}"
            )
        if end.cached_tokens >= request.num_prompt + len(text) or end.cached_tokens % self.situation.page_size:
            raise Violation(f"{request!r} found {end.cached_tokens} tokens cached: whole pages, never the last token")
        if end.finish in (Finish.STOP, Finish.LENGTH):
            if (text, end.finish) != (wanted, how):
                raise Violation(f"{request!r} ended by {end.finish} after {len(text)} of {len(wanted)} tokens")
        elif end.finish is Finish.ABORT:
            if request.id not in self.aborted and not detail.startswith("it waited for more than"):
                raise Violation(f"{request!r} was aborted, and nobody asked for that: {detail}")
        elif not detail.startswith(SCRIPTED) and self.guard.rejected.get(request.id) != detail:
            raise Violation(f"{request!r} ended with an error: {detail}")


@contextmanager
def closing(core: EngineCore) -> Iterator[EngineCore]:
    """Close the core at the end; where something went wrong already, what else goes wrong is not told."""
    try:
        yield core
    except BaseException:
        with suppress(Exception):
            core.close()
        raise
    core.close()
