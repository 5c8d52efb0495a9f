"""The hook bus. pluggy assembles it (specs, signatures, pending checks); after that the plugin set is frozen and each
hook is a plain list of callables, so that asking costs a loop and not a dispatch.

Policies are contained: one that raises or answers nonsense is passed over for the next answer, named, counted, and
disabled after ``FAULT_LIMIT`` faults. Role plugins (scheduler, KV cache) are trusted to raise: their faults stop the
engine, since nobody else could answer for them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pluggy

from engine.core import hookspecs
from engine.core.errors import InvariantViolation, PluginError
from engine.core.hookspecs import PROJECT
from engine.core.plan import EvictionPool, Outcome, Plan, Reject, Transfer, TransferEvent, Wait
from engine.core.protocols import Connector, KVCache, Plugin, Policy, Scheduler
from engine.core.request import Request

log = logging.getLogger(__name__)

FAULT_LIMIT = 10
HOOKS = ("plan", "order", "admit", "evict", "commit", "transfer_kv")


class Impl:
    """One plugin's implementation of one hook, called with the hook's arguments in order."""

    __slots__ = ("call", "contained", "disabled", "faults", "last_fault", "name")

    def __init__(self, name: str, call: Callable[..., Any], contained: bool) -> None:
        self.name = name
        self.call = call
        self.contained = contained
        self.disabled = False
        self.faults = 0
        self.last_fault = ""

    def fault(self, what: str) -> None:
        """Count a fault; raise it where the plugin is not contained."""
        self.faults += 1
        self.last_fault = what
        if not self.contained:
            raise InvariantViolation(f"{self.name}: {what}")
        self.disabled = self.faults >= FAULT_LIMIT
        tail = f"; disabled after {self.faults} faults" if self.disabled else ""
        log.warning("%s: %s; the default answers%s", self.name, what, tail)

    def ask(self, *args: Any) -> Any:
        """Call it; a contained plugin that raises answers ``None``."""
        try:
            return self.call(*args)
        except Exception as error:
            if not self.contained:
                raise
            self.fault(f"raised {type(error).__name__}: {error}")
            return None


class HookBus:
    """Who answers each hook, in the order of asking. Raises ``PluginError`` for hooks that no spec knows."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        members = list(plugins)
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        for number, plugin in enumerate(members):
            try:
                manager.register(plugin, name=f"{plugin.name}#{number}")
                manager.check_pending()
            except pluggy.PluginValidationError as error:
                raise PluginError(f"plugin {plugin.name!r}: {error}") from error
        self.manager = manager
        self._plan = self._impls("plan", members)
        self._order = self._impls("order", members)
        self._admit = self._impls("admit", members)
        self._evict = self._impls("evict", members)
        self._commit = self._impls("commit", members)
        self._transfer = self._impls("transfer_kv", members)
        if not self._plan:
            raise PluginError("no selected plugin answers 'plan': a scheduler is needed")

    def _impls(self, hook: str, members: Sequence[Plugin]) -> list[Impl]:
        """Implementations in the order of asking: policies as configured, then connectors, scheduler, KV cache.

        ``commit`` is told the other way round at its front: the KV cache first, then the scheduler.
        """
        spec = tuple(inspect.signature(getattr(hookspecs, hook)).parameters)
        rank = {KVCache: 0, Scheduler: 1} if hook == "commit" else {Policy: 0, Connector: 1, Scheduler: 2, KVCache: 3}
        found: list[tuple[int, int, Impl]] = []
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            if impl.wrapper or impl.hookwrapper or impl.tryfirst or impl.trylast:
                raise PluginError(
                    f"plugin {impl.plugin.name!r}: {hook!r} takes no wrapper, tryfirst or trylast: "
                    f"the order of asking is the configuration's"
                )
            if hook == "plan" and not isinstance(impl.plugin, Scheduler):
                raise PluginError(f"plugin {impl.plugin.name!r}: only a scheduler may answer 'plan'")
            place = next((value for role, value in rank.items() if isinstance(impl.plugin, role)), 9)
            call = _positional(impl.function, spec, impl.argnames)
            contained = isinstance(impl.plugin, Policy)
            found.append((place, members.index(impl.plugin), Impl(impl.plugin.name, call, contained)))
        return [impl for _, _, impl in sorted(found, key=lambda item: item[:2])]

    def faults(self) -> list[tuple[str, int, bool, str]]:
        """(plugin, faults, disabled, last fault) of every contained plugin that had one."""
        chains = (self._plan, self._order, self._admit, self._evict, self._commit, self._transfer)
        return [(i.name, i.faults, i.disabled, i.last_fault) for chain in chains for i in chain if i.faults]

    # ---- asking

    def ask_plan(self, step: Any) -> Plan:
        """The step's plan. Raises ``InvariantViolation`` where nobody planned."""
        for impl in self._plan:
            plan = impl.ask(step)
            if plan is not None:
                if isinstance(plan, Plan):
                    return plan
                impl.fault(f"plan answered {type(plan).__name__}, not the plan that step.seal() gives")
        raise InvariantViolation("no plugin answered 'plan'")

    @property
    def orders(self) -> bool:
        """Whether anybody answers ``order``."""
        return any(not impl.disabled for impl in self._order)

    def ask_order(self, step: Any, waiting: tuple[Request, ...]) -> list[Request] | None:
        """The first valid order, or ``None`` where nobody has a wish."""
        for impl in self._order:
            if impl.disabled:
                continue
            answer = impl.ask(step.view if impl.contained else step, waiting)
            if answer is None:
                continue
            ordered = _subset(answer, waiting)
            if ordered is not None:
                return ordered
            impl.fault("order answered requests that are unknown or repeated")
        return None

    def ask_admit(self, step: Any, request: Request) -> Wait | Reject | None:
        """The first objection, or ``None``."""
        for impl in self._admit:
            if impl.disabled:
                continue
            answer = impl.ask(step.view if impl.contained else step, request)
            if answer is None:
                continue
            if isinstance(answer, Wait | Reject) and isinstance(answer.reason, str):
                return answer
            impl.fault(f"admit answered {answer!r:.80}, not Wait or Reject with a text")
        return None

    def ask_evict(self, need: Callable[[], int], pool: EvictionPool) -> Iterator[Sequence[object]]:
        """Keys to give up, one plugin's answer after the other, the defaults last; for as long as they are asked for.

        Whoever uses the keys validates them, and stops when enough is given up; ``need`` says what is still missing.
        """
        for impl in self._evict:
            if impl.disabled:
                continue
            answer = impl.ask(need(), pool)
            if answer is None:
                continue
            if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
                yield answer
            else:
                impl.fault(f"evict answered {type(answer).__name__}, not a sequence of keys")

    def tell_commit(self, outcome: Outcome) -> None:
        """Tell everybody, the KV cache first."""
        for impl in self._commit:
            if not impl.disabled:
                impl.ask(outcome)

    def ask_transfer(self, transfers: Sequence[Transfer]) -> list[TransferEvent]:
        """Events of all connectors."""
        events: list[TransferEvent] = []
        for impl in self._transfer:
            events.extend(impl.ask(transfers) or ())
        return events


def _positional(function: Callable[..., Any], spec: Sequence[str], wanted: Sequence[str]) -> Callable[..., Any]:
    """The implementation as a callable of the spec's arguments, whichever of them it wants."""
    if tuple(wanted) == tuple(spec):
        return function
    places = [spec.index(name) for name in wanted]

    def call(*args: Any) -> Any:
        return function(*[args[place] for place in places])

    return call


def _subset(answer: Any, waiting: tuple[Request, ...]) -> list[Request] | None:
    try:
        ordered = list(answer)
        chosen = set(ordered)
    except TypeError:
        return None
    return ordered if len(chosen) == len(ordered) and chosen <= set(waiting) else None
