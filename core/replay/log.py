"""Decision logs decided anew: the same is asked of a new core, and every step is compared with the one recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np

from engine.core.errors import ConfigError, EngineError, PluginError
from engine.core.loop import EngineCore
from engine.core.plan import NO_DRAFT, Outcome
from engine.core.plan import Plan as Planned
from engine.core.pooling import Pooling, Vector
from engine.core.protocols import Executor, Limits, ModelInfo, Policy
from engine.core.record.facts import plan_line, queue_of
from engine.core.record.lines import Abort, Add, AnyLine, Commit, End, Expire, Fail, Flush, Idle, Plan, Ready, Weights
from engine.core.record.notes import PARAMS
from engine.core.record.pages import Unveiling, digests_of
from engine.core.record.reading import DecisionLog
from engine.core.registry import make
from engine.core.replay.cores import Choice, core_for
from engine.core.replay.report import Divergence, NotReplayable, Report
from engine.core.request import Finish, SamplingParams

VOCABULARY = 2**31
STOP = VOCABULARY - 1  # stands for the token that ended a request
OF_WORK = ("rows", "admitted", "preempted")
"""What parts two plans of different plugins; the words in which they say why always differ."""


@dataclass(frozen=True, slots=True)
class Setup:
    """With what a log is decided anew.

    Attributes:
        limits: the engine's.
        scheduler, kvcache: name and options.
        policies: name and options of each.
        overlap: whether steps overlap.
        fingerprint: of the model.
    """

    limits: Limits
    scheduler: Choice
    kvcache: Choice
    policies: tuple[Choice, ...] = ()
    overlap: bool = False
    fingerprint: str = ""
    made: Sequence[Policy] | None = field(default=None, compare=False)  # policies that were made already

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Setup:
        """As recorded. Raises ``NotReplayable`` where the header is not what an engine writes."""
        try:
            limits: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in config["limits"].items()
            }
            bounds = replace(Limits(**limits), vocab_size=VOCABULARY)
            return cls(
                replace(bounds, max_stop_token_ids=max(1, bounds.max_stop_token_ids)),
                _choice(config["scheduler"]), _choice(config["kvcache"]), tuple(map(_choice, config["policies"])),
                config["overlap"], config["model"]["fingerprint"],
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise NotReplayable(f"its header does not say all that is needed: {error!r}") from error

    def core(self, clock: Time, executor: Executor | None = None) -> EngineCore:
        """A core with these plugins and that clock.

        Args:
            executor: default: none computes; outcomes come from whoever plans and commits.

        Raises:
            NotReplayable: a plugin cannot be made.
        """
        model = ModelInfo(
            name="recorded", vocab_size=VOCABULARY, max_model_len=self.limits.max_model_len,
            fingerprint=self.fingerprint, hidden_size=1,
        )  # fmt: skip
        try:
            policies = self.made if self.made is not None else [make("policy", *one) for one in self.policies]
            return core_for(
                self.limits, self.scheduler, self.kvcache, model=model, policies=cast(Sequence[Policy], policies),
                executor=executor, overlap=self.overlap, clock=clock,
            )  # fmt: skip
        except (ConfigError, PluginError) as error:
            raise NotReplayable(f"it cannot be decided with these plugins: {error}") from error


def _choice(said: Mapping[str, Any]) -> Choice:
    return said["name"], said["options"]


class Time:
    """A clock that is set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time that was set last."""
        return self.now


class Cast:
    """The requests of a log: what they asked for, with tokens that stand for theirs.

    Attribute ``tokens``: all tokens of each by its number, prompt and output.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._unveiling = Unveiling(log.header.group)
        self.adds, self.ends = log.adds, log.ends
        self.tokens = {n: self._of(add, log.ends.get(n)) for n, add in log.adds.items()}

    def _of(self, add: Add, end: End | None) -> list[int]:
        digests = [*digests_of(add.pages), *(digests_of(end.pages) if end is not None else ())]
        return self._unveiling.tokens(digests, add.prompt + (end.output if end is not None else 0))

    def more(self, n: int, count: int) -> list[int]:
        """The first ``count`` tokens of a request; those beyond what was recorded are like nothing else. Mutates."""
        tokens = self.tokens[n]
        if len(tokens) < count:
            tokens += self._unveiling.unique(count - len(tokens))
        return tokens[:count]

    def arguments(self, add: Add) -> tuple[list[int], SamplingParams, dict[str, Any]]:
        """Of ``EngineCore.add``."""
        known = {name: value for name, value in add.params.items() if name in _PARAMS}
        params = SamplingParams() if add.pooling else SamplingParams(**known, stop_token_ids=(STOP,))
        more = {
            "request_id": add.id,
            "priority": add.priority,
            "salt": add.salt,
            "adapter": add.adapter,
            "arrival": add.t if add.arrival is None else add.arrival,
            "read_cache": add.read,
            "write_cache": add.write,
            "deadline": add.deadline,
            "cache_ttl": add.ttl,
            "pooling": Pooling(kind=add.pooling) if add.pooling else None,
            "metadata": add.metadata,
            "parked_on": add.parked,
        }
        return self.tokens[add.n][: add.prompt], params, more


_PARAMS = frozenset(PARAMS)


def some_vectors(plan: Planned) -> dict[int, Vector]:
    """By row, what is expected of those that pool: it decides nothing, and is not recorded."""
    return {row: np.zeros(1, np.float32) for row in plan.pooled if plan.pooled_positions(row)}


class Parted(Exception):
    """What was decided now is not what was recorded."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(divergence.step)
        self.divergence = divergence


class Stage:
    """Asks a new core what a log says was asked, and compares.

    Args:
        fields: of a plan that are compared; ``None``: all of them.
    """

    def __init__(self, log: DecisionLog, setup: Setup, fields: Sequence[str] | None = None) -> None:
        self._log, self._fields = log, fields
        self._time = Time(log.header.time)
        self._cast = Cast(log)
        self._numbers = {add.id: add.n for add in log.adds.values()}
        self._ids = {add.n: add.id for add in log.adds.values()}
        self._plans: list[Planned] = []
        self.steps = 0
        self.core = setup.core(self._time)

    def run(self) -> Divergence | None:
        """All of it, up to the first difference. Raises what the core raises where a log does not hold together."""
        try:
            for line in self._log.lines:
                self._play(line)
        except Parted as parted:
            return parted.divergence
        finally:
            self.core.close()
        return None

    def _play(self, line: AnyLine) -> None:
        core = self.core
        self._time.now = getattr(line, "t", self._time.now)
        match line:
            case Add():
                tokens, params, more = self._cast.arguments(line)
                core.add(tokens, params, **more)
            case Plan():
                self._plan(line)
            case Commit():
                self._commit(line)
            case Ready():
                core.ready(self._ids[line.n], line.what)
            case Abort():
                core.abort(self._ids[line.n], Finish(line.finish))
            case Fail():
                core.fail_step(self._plans[0], "recorded")
                self._plans.clear()
            case Expire():
                core.expire(line.t)
            case Idle():
                core.idle()
            case Weights():
                core.rename_model(line.fingerprint)
            case Flush():
                core.cache.flush()
        core.take_deltas()

    def _plan(self, line: Plan) -> None:
        core = self.core
        plan = core.plan()
        self._plans.append(plan)
        now = plan_line(plan, self._numbers, queue_of(core), len(core.parked), core.kv.available())
        now.step = plan.index
        recorded, decided = self._compared(line), self._compared(now)
        if recorded != decided:
            raise Parted(Divergence(line.step, recorded, decided))
        self.steps += 1

    def _compared(self, line: Plan) -> dict[str, Any]:
        """A plan as it is compared. Rows with their counts; as a set where only the work is compared."""
        values = msgspec.structs.asdict(line)
        pairs = list(zip(line.rows or [], line.each, strict=True))
        values["rows"] = pairs if self._fields is None else sorted(pairs)
        for name in ("t", "s", "counts"):
            del values[name]
        values["waits"], values["cuts"] = sorted(values["waits"]), sorted(values["cuts"])
        return values if self._fields is None else {name: values[name] for name in self._fields}

    def _commit(self, line: Commit) -> None:
        plan = self._plans.pop(0)
        tokens = self._tokens(line, plan)
        proposals = {row: (NO_DRAFT,) * count for row, count in line.proposals}
        errors = dict.fromkeys(line.errors, "recorded")
        outcome = Outcome(plan, tokens, errors, proposals, pooled=some_vectors(plan))
        self.core.commit(outcome)
        finished = [(self._numbers[r.id], r.finish.value) for r in outcome.finished if r.finish is not None]
        recorded = {"finished": line.finished, "dropped": line.dropped}
        decided = {"finished": finished, "dropped": list(outcome.dropped)}
        if recorded != decided:
            raise Parted(Divergence(line.step, recorded, decided))

    def _tokens(self, line: Commit, plan: Planned) -> list[tuple[int, ...]]:
        """What the model said, by row."""
        counts = [int(samples) for samples in plan.samples] if line.tokens is None else line.tokens
        ended = dict(line.finished)
        found: list[tuple[int, ...]] = []
        for row, (request, count) in enumerate(zip(plan.requests, counts, strict=True)):
            number = self._numbers[request.id]
            known = len(request.tokens)
            said = self._cast.more(number, known + count)[known:]
            how = ended.get(number)
            if said and how == Finish.STOP.value:
                said[-1] = STOP
            elif said and how == Finish.ERROR.value and row not in line.errors:
                said[-1] = -1  # it was no token of the vocabulary
            found.append(tuple(said))
        return found


def replay(log: DecisionLog, name: str, setup: Setup | None = None, fields: Sequence[str] | None = None) -> Report:
    """Decide a log anew and compare each step; stops at the first difference.

    Args:
        setup: with these plugins; default: as recorded.
        fields: of plans that are compared (default: all).

    Raises:
        NotReplayable: it cannot be decided anew exactly, or a plugin cannot be made.
    """
    if log.inexact:
        raise NotReplayable(log.inexact)
    stage = Stage(log, setup or Setup.of(log.header.config), fields)
    try:
        divergence = stage.run()
    except EngineError as error:
        if setup is None:
            raise
        raise NotReplayable(f"after {stage.steps} steps: {error}") from error
    return Report(name, stage.steps, divergence)
