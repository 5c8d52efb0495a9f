"""What is compared: a scheduler with its KV manager, driven step by step by a model that costs no time."""

from __future__ import annotations

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.core import EngineConfig, SamplingParams
from engine.core.assemble import assemble
from engine.core.plan import Outcome

PAGE_SIZE = 16
MAX_MODEL_LEN = 100_000

Clock = Callable[[], int]
WALL: Clock = time.perf_counter_ns
CPU: Clock = time.thread_time_ns


class Stopwatch:
    """Nanoseconds spent in planning and in committing, the clock's own cost taken off.

    Args:
        clock: ``WALL`` or ``CPU``; reading the latter is a system call, which is why a round reads only one of them.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        readings = [clock() for _ in range(2001)]
        self.cost = statistics.median(b - a for a, b in itertools.pairwise(readings))
        self.plan = self.commit = 0.0

    def reset(self) -> None:
        """Start from nothing."""
        self.plan = self.commit = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What both sides are built with."""

    running: int
    pages: int
    budget: int = 2048
    overlap: bool = False


class Side(ABC):
    """One scheduler with its KV manager. What the model would do is done between the timed parts."""

    name: str

    def __init__(self, sizes: Sizes) -> None:
        self._overlap = sizes.overlap
        self._flying: deque[tuple[Any, Any]] = deque()
        self._token = 0
        self._made = 0

    def step(self, watch: Stopwatch) -> None:
        """Plan one step, and commit it; with overlap, commit the one before."""
        clock = watch.clock
        start = clock()
        plan = self._plan()
        watch.plan += clock() - start - watch.cost
        self._launch(plan)
        if len(self._flying) <= self._overlap:
            return
        plan, outcome = self._flying.popleft()
        start = clock()
        self._commit(plan, outcome)
        watch.commit += clock() - start - watch.cost

    def admit(self, prompt: Sequence[int], watch: Stopwatch) -> None:
        """A request comes and is planned (timed, as ``plan``); its one token ends it."""
        name, params = self._next_name(), self._params(1)
        clock = watch.clock
        start = clock()
        self._add(name, prompt, params)
        plan = self._plan()
        watch.plan += clock() - start - watch.cost
        self._launch(plan)
        self._commit(*self._flying.popleft())

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request, untimed."""
        self._add(self._next_name(), prompt, self._params(max_tokens))

    def _next_name(self) -> str:
        self._made += 1
        return f"r{self._made}"

    def _launch(self, plan: Any) -> None:
        self._token = (self._token + 1) % 1000
        self._flying.append((plan, self._outcome(plan, self._token)))

    @property
    @abstractmethod
    def running(self) -> int:
        """Requests that hold pages."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests in the queue."""

    @property
    @abstractmethod
    def decoding(self) -> bool:
        """Whether no running request has prompt left to plan."""

    @property
    @abstractmethod
    def preemptions(self) -> int:
        """How often a request lost its pages."""

    @abstractmethod
    def _params(self, max_tokens: int) -> Any: ...

    @abstractmethod
    def _add(self, name: str, prompt: Sequence[int], params: Any) -> None: ...

    @abstractmethod
    def _plan(self) -> Any: ...

    @abstractmethod
    def _outcome(self, plan: Any, token: int) -> Any: ...

    @abstractmethod
    def _commit(self, plan: Any, outcome: Any) -> None: ...

    def close(self) -> None:
        """Let go of everything."""
        self._flying.clear()


class Ours(Side):
    """``unified`` over ``paged``."""

    name = "ours"
    plugins: Mapping[str, Any] = MappingProxyType({"scheduler": "unified", "kvcache": "paged", "page_size": PAGE_SIZE})

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self._core = assemble(
            EngineConfig(
                executor={"name": "sim", "max_model_len": MAX_MODEL_LEN},
                **self.plugins,
                max_running=sizes.running,
                max_batch_tokens=sizes.budget,
                num_pages=sizes.pages,
                max_waiting=20_000,
                overlap=sizes.overlap,
            )
        )

    @property
    def running(self) -> int:
        return len(self._core.running)

    @property
    def waiting(self) -> int:
        return len(self._core.waiting)

    @property
    def decoding(self) -> bool:
        return all(request.debt <= 1 for request in self._core.running)

    @property
    def preemptions(self) -> int:
        return self._core.counters.preemptions

    def _params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, seed=0)

    def _add(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._core.add(prompt, params, request_id=name)

    def _plan(self) -> Any:
        return self._core.plan()

    def _outcome(self, plan: Any, token: int) -> Outcome:
        return Outcome(plan, [(token,) if samples else () for samples in plan.samples])

    def _commit(self, plan: Any, outcome: Outcome) -> None:
        self._core.commit(outcome)
        self._core.take_deltas()

    def close(self) -> None:
        super().close()
        self._core.close()
