"""The hook bus. pluggy assembles it (specs, signatures, pending checks); after that the plugin set is frozen and each
hook is a plain tuple of callables, so that asking costs a loop and not a dispatch.

Policies and connectors are contained, the roles that nobody else can play are not: see ``containment``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pluggy

from engine.core import answers
from engine.core.capabilities import role_of
from engine.core.containment import (
    ASK_SECONDS,
    FAULT_LIMIT,
    STAT,
    STAT_DISABLED,
    Impl,
    PluginFaults,
    Record,
    RoleImpl,
)
from engine.core.contract import CONTRACT, HOOKS, Contract
from engine.core.errors import InvariantViolation, PluginError
from engine.core.hookspecs import PROJECT
from engine.core.pages import PagePool
from engine.core.plan import EvictionPool, Outcome, Plan, Reject, Transfer, TransferEvent, Wait
from engine.core.protocols import Connector, KVCache, Plugin, Policy, Scheduler
from engine.core.request import Request
from engine.core.watch import RequestWatch

MOST_KEYS = 1_000_000
RANKS: Mapping[type, int] = {Policy: 0, Connector: 1, Scheduler: 2, KVCache: 3}
COMMIT_RANKS: Mapping[type, int] = {KVCache: 0, Scheduler: 1}


class HookBus:
    """Who answers each hook, in the order of asking.

    Args:
        plugins: scheduler, KV cache, connectors, policies; those of a role in the order of the configuration.
        pool: the pages that ``evict`` answers are about.
        watch: looks after each ask whether a request was changed (audit mode).
        ask_seconds: what one ask of a contained plugin may take, or that by hook. Slower ones count as faults.
        contract: the contract in force.

    Attributes:
        lost: wishes that nobody took when connectors were asked last.
        silent: names of the connectors that were disabled.

    Raises ``PluginError`` for hooks and parameters that no spec knows.
    """

    def __init__(
        self,
        plugins: Iterable[Plugin],
        *,
        pool: PagePool | None = None,
        watch: RequestWatch | None = None,
        ask_seconds: float | Mapping[str, float] = ASK_SECONDS,
        contract: Contract | None = None,
    ) -> None:
        members = list(plugins)
        self._pool = pool
        self._contract = contract = CONTRACT if contract is None else contract
        self._seconds = ask_seconds if isinstance(ask_seconds, Mapping) else dict.fromkeys(HOOKS, ask_seconds)
        self._watch = watch
        self.lost: tuple[Transfer, ...] = ()
        self.silent: frozenset[str] = frozenset()
        self._records = {id(plugin): Record(plugin, name, self._prune) for plugin, name in _named(members)}
        self._check_evict = partial(answers.evict, most=pool.num_pages if pool is not None else MOST_KEYS)
        self.manager = _registered(members, contract)
        self._chains = {hook: self._impls(hook, members) for hook in HOOKS}
        self._connected = bool(self._chains["transfer_kv"])
        self._prune()
        if not self._plan:
            raise PluginError("no selected plugin answers 'plan': a scheduler is needed")

    def _prune(self) -> None:
        """Those that were disabled are asked no more."""
        alive = {
            hook: tuple(impl for impl in chain if not impl.record.disabled) for hook, chain in self._chains.items()
        }
        self._plan, self._order, self._admit = alive["plan"], alive["order"], alive["admit"]
        self._evict, self._commit, self._transfer = alive["evict"], alive["commit"], alive["transfer_kv"]
        self.silent = frozenset(impl.record.name for impl in self._chains["transfer_kv"] if impl.record.disabled)

    def _impls(self, hook: str, members: Sequence[Plugin]) -> tuple[Impl, ...]:
        """Implementations in the order of asking: policies as configured, then connectors, scheduler, KV cache.

        ``commit`` is told the other way round at its front: the KV cache first, then the scheduler.
        """
        rank = COMMIT_RANKS if hook == "commit" else RANKS
        found: list[tuple[int, int, Impl]] = []
        for impl in getattr(self.manager.hook, hook).get_hookimpls():
            plugin = impl.plugin
            if impl.wrapper or impl.hookwrapper or impl.tryfirst or impl.trylast:
                raise PluginError(
                    f"plugin {plugin.name!r}: {hook!r} takes no wrapper, tryfirst or trylast: "
                    f"the order of asking is the configuration's"
                )
            if hook == "plan" and not isinstance(plugin, Scheduler):
                raise PluginError(f"plugin {plugin.name!r}: only a scheduler may answer 'plan'")
            place = next((value for role, value in rank.items() if isinstance(plugin, role)), 9)
            call = self._contract.caller(hook, impl.function, impl.argnames)
            kind = Impl if isinstance(plugin, Policy | Connector) else RoleImpl
            made = kind(hook, plugin, call, self._records[id(plugin)], self._seconds.get(hook, ASK_SECONDS))
            made.watch = self._watch.before if self._watch is not None and made.contained else None
            found.append((place, members.index(plugin), made))
        return tuple(impl for _, _, impl in sorted(found, key=lambda item: item[:2]))

    # ---- to look at

    def name(self, plugin: Plugin) -> str:
        """What a plugin is called here: its name, with a number where it is the second of that name."""
        return self._records[id(plugin)].name

    def faults(self) -> list[PluginFaults]:
        """Every contained plugin that had a fault, in the order of the configuration."""
        return [record.summary() for record in self._records.values() if record.kinds]

    def stats(self) -> dict[str, int | float]:
        """The same as flat counters: ``plugin_faults:NAME:KIND`` and ``plugin_disabled:NAME``."""
        values: dict[str, int | float] = {}
        for faults in self.faults():
            values |= {f"{STAT}{faults.plugin}:{kind}": count for kind, count in faults.kinds.items()}
            values[f"{STAT_DISABLED}{faults.plugin}"] = int(faults.disabled)
        return values

    def asked(self) -> dict[str, list[str]]:
        """Hook -> names of those that answer it, in the order of asking; the disabled are left out."""
        alive = (self._plan, self._order, self._admit, self._evict, self._commit, self._transfer)
        return {hook: [impl.record.name for impl in chain] for hook, chain in zip(HOOKS, alive, strict=True)}

    # ---- asking

    def ask_plan(self, step: Any) -> Plan:
        """The step's plan. Raises ``InvariantViolation`` where nobody planned."""
        for impl in self._plan:
            plan: Plan | None = impl.ask(answers.plan, step)
            if plan is not None:
                return plan
        raise InvariantViolation(f"scheduler {self._plan[0].name!r} did not answer 'plan'")

    @property
    def orders(self) -> bool:
        """Whether anybody answers ``order``."""
        return bool(self._order)

    def ask_order(self, step: Any, waiting: tuple[Request, ...]) -> list[Request] | None:
        """The first valid order, or ``None`` where nobody has a wish."""
        for impl in self._order:
            ordered: list[Request] | None = impl.ask(answers.order, step.view if impl.contained else step, waiting)
            if ordered is not None:
                return ordered
        return None

    def ask_admit(self, step: Any, request: Request) -> Wait | Reject | None:
        """The first objection, or ``None``."""
        for impl in self._admit:
            objection: Wait | Reject | None = impl.ask(answers.admit, step.view if impl.contained else step, request)
            if objection is not None:
                return objection
        return None

    def ask_evict(self, need: Callable[[], int], pool: EvictionPool) -> Iterator[Sequence[object]]:
        """Keys to give up, one plugin's answer after the other, the defaults last; for as long as they are asked for.

        Whoever uses the keys validates them, and stops when enough is given up; ``need`` says what is still missing.
        """
        for impl in self._evict:
            before = need()
            keys: Sequence[object] | None = impl.ask(
                self._check_evict if impl.contained else answers.role_evict, before, pool
            )
            if keys is None:
                continue
            yield keys
            if keys and impl.contained and need() == before and not self._fenced():
                impl.fault("answered", f"evict answered {len(keys)} keys, and none of them can be given up")

    def _fenced(self) -> bool:
        """Whether a transfer keeps pages that were given up: then an eviction frees nothing at once."""
        return self._pool is not None and self._pool.num_fenced > 0

    def tell_commit(self, outcome: Outcome) -> None:
        """Tell everybody, the KV cache first."""
        for impl in self._commit:
            impl.ask(None, outcome)

    @property
    def deaf(self) -> bool:
        """Whether there were connectors and all of them have been disabled: nobody will answer for open transfers."""
        return self._connected and not self._transfer

    def ask_transfer(self, transfers: Sequence[Transfer]) -> list[TransferEvent]:
        """Events of all connectors; each is shown what is for it. ``lost`` then holds the wishes that nobody took."""
        events: list[TransferEvent] = []
        heard: set[str] = set()
        for impl in self._transfer:
            before = impl.record.kinds.total() - impl.record.kinds["slow"]
            mine = [wish for wish in transfers if wish.to in ("", impl.record.name)]
            events.extend(impl.ask(answers.transfer_kv, mine) or ())
            if impl.record.kinds.total() - impl.record.kinds["slow"] == before:  # a slow answer stands
                heard.update(wish.id for wish in mine)
        self.lost = tuple(wish for wish in transfers if wish.id not in heard) if self._transfer else ()
        return events


def _named(members: Sequence[Plugin]) -> list[tuple[Plugin, str]]:
    """Each plugin with its name, those of a role with the role's before it; the second of one name is ``name#2``."""
    seen: dict[str, int] = {}
    named = []
    for plugin in members:
        name = plugin.name or type(plugin).__name__
        if not isinstance(plugin, Policy | Connector):
            name = f"{role_of(plugin)} {name}"
        seen[name] = seen.get(name, 0) + 1
        named.append((plugin, name if seen[name] == 1 else f"{name}#{seen[name]}"))
    return named


def _registered(members: Sequence[Plugin], contract: Contract) -> pluggy.PluginManager:
    """A manager that knows them all. Raises ``PluginError`` for hooks and parameters that no spec knows."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(contract.specs())
    for number, plugin in enumerate(members):
        try:
            contract.warn(type(plugin), f"plugin {plugin.name!r}")
            manager.register(plugin, name=f"{plugin.name}#{number}")
            manager.check_pending()
        except (pluggy.PluginValidationError, PluginError, ValueError) as error:
            raise PluginError(f"plugin {plugin.name!r} of {plugin.origin}: {error}") from error
    return manager


__all__ = ["FAULT_LIMIT", "HOOKS", "HookBus"]
