"""Busy, seeded runs of an engine that records itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine.core import SamplingParams
from engine.core.errors import InvalidRequest, QueueFull
from engine.core.loop import EngineCore
from engine.core.record.desk import RecordOptions
from engine.core.record.reading import DecisionLog, read
from engine.core.registry import make
from engine.plugins.executors.sim import SimExecutor
from engine.testing import ScriptedExecutor, make_core

VOCABULARY = 5000
ON = RecordOptions(on=True, ring_mb=256)


def prompt(rng: random.Random) -> list[int]:
    """Prompts of a few families, whose members share beginnings of many lengths."""
    family = rng.randrange(6)
    shared = rng.choice((0, 4, 16, 31, 32, 47, 64, 90))
    return [family * 100 + at for at in range(shared)] + [
        rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))
    ]


class Crowd:
    """Clients of one core: they come in bursts, talk on, leave, have deadlines, tenants, priorities and salts."""

    def __init__(self, core: EngineCore, rng: random.Random) -> None:
        self.core, self.rng = core, rng
        self.talks: list[list[int]] = []
        self.turns = 0

    def turn(self) -> None:
        """What happens between two steps. Mutates the core."""
        core, rng = self.core, self.rng
        self.turns += 1
        busy = (self.turns // 400) % 3  # a rush, some, nearly nobody
        for _ in range(rng.choice(((0, 0, 1, 2), (0, 0, 0, 1), (0,) * 12 + (1,))[busy])):
            self._come()
        for name in list(core.parked):
            if rng.random() < 0.4:
                core.ready(name, "adapter")
        if core.requests and rng.random() < 0.03:
            core.abort(rng.choice(list(core.requests)))
        if rng.random() < 0.001:
            core.cache.flush()

    def _come(self) -> None:
        core, rng = self.core, self.rng
        tokens = prompt(rng)
        if self.talks and rng.random() < 0.3:  # the next turn of a conversation
            tokens = [*rng.choice(self.talks[-20:]), *tokens[-6:]]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), stop_token_ids=tuple(range(0, VOCABULARY, 40)),
            ignore_eos=rng.random() < 0.2, min_tokens=1 if rng.random() < 0.1 else 0,
        )  # fmt: skip
        metadata: dict[str, Any] = {"tenant": rng.choice("abc"), "user": "a name", "deadline_in": rng.random()}
        try:
            request = core.add(
                tokens, params, priority=rng.choice((0, 0, 1, 20)), salt=rng.choice(("", "", "s")),
                adapter=rng.choice(("", "", "", "lora")), metadata=metadata,
                deadline=rng.choice((None, None, 0.2, 2.0)), read_cache=rng.random() < 0.95,
                write_cache=rng.random() < 0.95, parked_on=["adapter"] if rng.random() < 0.05 else [],
            )  # fmt: skip
        except (InvalidRequest, QueueFull):
            return
        self.talks.append(request.tokens)


def busy_run(
    steps: int, *, seed: int = 1, policies: tuple[str, ...] = (), record_mb: int = 256, **setting: Any
) -> EngineCore:
    """A core that has recorded so many busy steps, and all that was left then, closed by whoever is given it."""
    rng = random.Random(seed)
    executor = SimExecutor(SimExecutor.Options(vocab_size=VOCABULARY))
    usual: dict[str, Any] = {
        "num_pages": 40, "page_size": 16, "max_model_len": 400, "max_batch_tokens": 96, "max_running": 12,
        "max_waiting": 40, "audit": False,
    }  # fmt: skip
    core = make_core(
        executor=executor, policies=[make("policy", name) for name in policies],
        **{"record": RecordOptions(on=True, ring_mb=record_mb), **usual, **setting},
    )  # fmt: skip
    crowd = Crowd(core, rng)
    while core.counters.steps < steps:
        crowd.turn()
        core.step()
    while core.has_work:
        for name in list(core.parked):
            core.ready(name, "adapter")
        core.step()
    return core


def faulty_run(*, seed: int = 0, **setting: Any) -> EngineCore:
    """A short run with drafts, failing rows and failing steps."""
    rng = random.Random(seed)
    executor = ScriptedExecutor()
    executor.drafter = lambda request: tuple(rng.randrange(100) for _ in range(request.num_tokens % 3))
    core = make_core(executor=executor, record=ON, **setting)
    for number in range(60):
        if number < 30:
            tokens = [at % 7 for at in range(rng.randrange(1, 20))]
            core.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 12)), salt="ab"[number % 2])
        if number == 12 and core.running:
            core.abort(core.running[0].id)
        if number == 15 and core.running:
            executor.row_errors = {core.running[0].id: "injected"}
        executor.fail_next = int(number == 20)
        core.step()
    while core.has_work:
        core.step()
    return core


def written(core: EngineCore, path: Path) -> DecisionLog:
    """What the core has recorded, through a file. Closes the core."""
    core.record.write(path)
    core.close()
    return read(path)
