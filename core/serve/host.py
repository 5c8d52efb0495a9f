"""The loop around an engine core: take commands, step while there is work, send what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.core.errors import EngineError, InvalidRequest, QueueFull
from engine.core.plan import Delta, Plan, Why
from engine.core.pooling import Pooling
from engine.core.protocols import Limits, ModelInfo
from engine.core.request import Finish, Request, SamplingParams
from engine.core.serve.messages import (
    Abort,
    Add,
    AskDesk,
    AskStats,
    Command,
    DeskAnswer,
    Event,
    Outputs,
    Refused,
    Shutdown,
    Stats,
    Submit,
    Updated,
    UpdateWeights,
)
from engine.core.serve.meter import Meter, waiting_reasons
from engine.core.stats import Counters

if TYPE_CHECKING:
    from engine.core.cache_desk import CacheDesk
    from engine.core.lens.desk import Lens
    from engine.core.record.desk import RecordDesk


class Core(Protocol):
    """The part of ``engine.core.loop.EngineCore`` that serving needs."""

    @property
    def has_work(self) -> bool:
        """True while a step could bring news."""

    @property
    def settled(self) -> bool:
        """True while nothing is left of its requests, but KV that goes out."""

    @property
    def rest(self) -> float:
        """Seconds to wait for commands after a step that brought nothing."""

    @property
    def limits(self) -> Limits:
        """Of which ``max_waiting`` bounds the queue."""

    @property
    def waiting(self) -> Collection[Request]:
        """Requests in the queue."""

    @property
    def parked(self) -> Mapping[str, Request]:
        """Requests that are not ready, by id; they count against the queue's bound."""

    @property
    def counters(self) -> Counters:
        """Totals since the start."""

    @property
    def last_plan(self) -> Plan | None:
        """The plan made last."""

    def now(self) -> float:
        """Seconds on the core's clock."""

    @property
    def cache(self) -> CacheDesk:
        """What can be asked of its cache."""

    @property
    def record(self) -> RecordDesk:
        """What can be asked of its decisions."""

    @property
    def lens(self) -> Lens:
        """What is shown to people who watch it."""

    def add(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        salt: str = "",
        metadata: dict[str, Any] | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
        cache_ttl: float | None = None,
        deadline: float | None = None,
        pooling: Pooling | None = None,
    ) -> Any:
        """Queue a request. Raises ``InvalidRequest`` or ``QueueFull``."""

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: str | None = None) -> bool:
        """End a request."""

    def step(self) -> list[Delta]:
        """Plan, execute and commit once."""

    def take_refused(self) -> list[tuple[str, InvalidRequest]]:
        """Requests that turned out to be invalid after they were queued."""

    def update_weights(self, new: Any, *, running: Any, version: str | None) -> ModelInfo:
        """Replace weights between two steps."""

    def stats(self) -> dict[str, int | float]:
        """Counters and gauges."""


class Intake:
    """Feeds a core without overflowing its queue: what does not fit waits here, in order.

    A group of requests is accepted as a whole by whoever counts them (the client); the core's queue may be shorter
    than the group, because nothing has been admitted yet.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._backlog: deque[Add | UpdateWeights] = deque()

    def __len__(self) -> int:
        return len(self._backlog)

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return sum(isinstance(item, Add) for item in self._backlog)

    @property
    def waiting_tokens(self) -> int:
        """Their prompts' tokens."""
        return sum(len(item.tokens) for item in self._backlog if isinstance(item, Add))

    def bar(self, update: UpdateWeights) -> None:
        """What comes after this waits until the core has nothing left of what came before: see ``raised``."""
        self._backlog.append(update)

    def raised(self) -> UpdateWeights | None:
        """The update whose turn it is, if it is one's turn. Mutates: what came after it goes on."""
        if self._backlog and isinstance(self._backlog[0], UpdateWeights) and self._core.settled:
            update = self._backlog.popleft()
            assert isinstance(update, UpdateWeights)
            return update
        return None

    def put(self, items: Sequence[Add]) -> None:
        """Accept requests; ``pump`` hands them on."""
        self._backlog.extend(items)

    def cancel(self, request_id: str) -> bool:
        """Forget a request that has not reached the core. Idempotent."""
        for item in self._backlog:
            if isinstance(item, Add) and item.request_id == request_id:
                self._backlog.remove(item)
                return True
        return False

    def pump(self) -> list[tuple[Add, InvalidRequest]]:
        """Hand on what the core's queue has room for. Returns those that the core refused, with its words."""
        refused: list[tuple[Add, InvalidRequest]] = []
        while self._backlog and self._room() > 0:
            item = self._backlog[0]
            if isinstance(item, UpdateWeights):
                break
            try:
                self._core.add(
                    item.tokens,
                    item.params,
                    request_id=item.request_id,
                    priority=item.priority,
                    salt=item.salt,
                    metadata=item.metadata,
                    read_cache=item.read_cache,
                    write_cache=item.write_cache,
                    cache_ttl=item.cache_ttl,
                    deadline=item.deadline,
                    pooling=item.pooling,
                )
            except QueueFull:
                break  # not an error here: the next step makes room, and the client bounds how many there can be
            except InvalidRequest as error:
                refused.append((item, error))
            self._backlog.popleft()
        return refused

    def _room(self) -> int:
        """Asked before each request is handed on: the core would check a whole prompt only to say that it is full."""
        core = self._core
        return core.limits.max_waiting - len(core.waiting) - len(core.parked)


class Host:
    """Drives one core on behalf of one client. All calls of the core happen in the thread that calls ``run``.

    ``steps``, ``busy`` and ``advanced`` may be read by any thread: they are how others see progress.
    """

    def __init__(self, core: Core, emit: Callable[[Event], None]) -> None:
        self._core = core
        self._emit = emit
        self._intake = Intake(core)
        self._meter = Meter(core)
        self._quiet = False
        self.steps = 0
        self.busy = False

    @property
    def advanced(self) -> int:
        """How many steps brought work forward."""
        return self._meter.advanced

    def run(self, take: Callable[[float | None], list[Command]]) -> None:
        """Serve until ``Shutdown``. Whatever escapes a step escapes here too: it is fatal.

        Args:
            take: waits up to so many seconds (``None``: for ever) for commands and returns all there are.
        """
        while True:
            for command in take(self._patience()):
                if isinstance(command, Shutdown):
                    return
                self._obey(command)
            self._advance()

    def _patience(self) -> float | None:
        if not self.busy:
            return None
        # A step without any output may mean that all live requests are parked: look again soon, but do not spin.
        return self._core.rest if self._quiet else 0.0

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(items=items):
                self._intake.put(items)
            case Abort(request_ids=ids, finish=finish, detail=detail):
                for request_id in ids:
                    if not self._intake.cancel(request_id):
                        self._core.abort(request_id, finish, detail)
            case AskStats(number=number):
                self._emit(Stats(number, self._stats(), self._meter.histograms(), self._waits()))
            case AskDesk():
                self._emit(self._of_desk(command))
            case UpdateWeights(running="finish"):
                self._intake.bar(command)
            case UpdateWeights():
                self._update(command, command.running)

    def _of_desk(self, command: AskDesk) -> DeskAnswer:
        if command.desk == "record":
            self._hand_on()  # whoever asks about a request has submitted it before
        desk: CacheDesk | RecordDesk | Lens = getattr(self._core, command.desk)
        try:
            return DeskAnswer(command.number, desk.ask(command.what, command.options))
        except InvalidRequest as error:
            return DeskAnswer(command.number, None, "InvalidRequest", error.field, error.message)
        except EngineError as error:
            return DeskAnswer(command.number, None, type(error).__name__, message=str(error))

    def _hand_on(self) -> None:
        """What came goes to the core, as far as its queue has room."""
        for item, error in self._intake.pump():
            self._emit(Refused(item.request_id, error.field, error.message, error.code))

    def _update(self, command: UpdateWeights, running: str) -> None:
        try:
            model = self._core.update_weights(command.weights, running=running, version=command.version)
        except EngineError as error:
            self._emit(Updated(command.number, None, type(error).__name__, str(error)))
        else:
            self._emit(Updated(command.number, model))

    def _advance(self) -> None:
        while (update := self._intake.raised()) is not None:
            self._update(update, "refuse")
        self._hand_on()
        self.busy = self._core.has_work or len(self._intake) > 0
        if not self.busy:
            return
        began = time.perf_counter()
        deltas = self._core.step()
        seconds = time.perf_counter() - began
        started = self._meter.stepped(seconds)
        if self._core.lens.steps is not None:
            self._core.lens.stepped(seconds)
        for request_id, refusal in self._core.take_refused():  # before the end that the deltas tell
            self._emit(Refused(request_id, refusal.field, refusal.message, refusal.code))
        self.steps += 1
        self._quiet = not deltas
        if deltas or started:
            self._emit(Outputs(deltas, started))
        self.busy = self._core.has_work or len(self._intake) > 0

    def _waits(self) -> dict[str, int]:
        found = waiting_reasons(self._core)
        if self._intake.waiting:
            found[Why.NOT_ASKED.value] = found.get(Why.NOT_ASKED.value, 0) + self._intake.waiting
        return found

    def _stats(self) -> dict[str, int | float]:
        values = dict(self._core.stats())
        values["waiting"] = values.get("waiting", 0) + self._intake.waiting
        values["waiting_tokens"] = values.get("waiting_tokens", 0) + self._intake.waiting_tokens
        return values
