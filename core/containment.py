"""What becomes of a plugin that raises, answers nonsense or takes too long.

Policies and connectors are *contained*: the next answer stands, the plugin is named and counted, and after
``FAULT_LIMIT`` faults within ``FAULT_WINDOW`` seconds it is asked nothing any more. The limit is one a plugin, over all
its hooks: one whose books are wrong in one hook decides wrongly in the others, and half a policy is no policy.

The roles that nobody else can play (scheduler, KV cache, executor) are not contained: they fail the request or stop the
engine, with a diagnosis that names them.

Containment is against mistakes and not against malice: a plugin is code in this process.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from engine.core.capabilities import label
from engine.core.errors import EngineError, InvariantViolation, PluginError, one_line
from engine.core.protocols import Context, Plugin

log = logging.getLogger(__name__)

FAULT_LIMIT = 10
FAULT_WINDOW = 600.0
ASK_SECONDS = math.inf  # a configured engine has a limit; stepped by hand, what is decided depends on no clock
KINDS = ("raised", "answered", "slow", "changed")
CONTAINED = (Exception, SystemExit, GeneratorExit)  # a policy that calls sys.exit() ends no engine
STAT = "plugin_faults:"
STAT_DISABLED = "plugin_disabled:"


class Nonsense(Exception):
    """An answer that breaks the hook's rules; the words say which."""


class PluginFaults(NamedTuple):
    """What one plugin did wrong since the start. ``kinds``: raised, answered (nonsense), slow, changed (a request)."""

    plugin: str
    faults: int
    disabled: bool
    origin: str
    kinds: Mapping[str, int]
    last: str


class Record:
    """The faults of one plugin, over all its hooks.

    Args:
        plugin: whose.
        name: how metrics and reports call it; unique among those that are asked.
        disable: told once, when it is to be asked nothing any more.
    """

    __slots__ = ("_disable", "_times", "disabled", "kinds", "label", "last", "name", "origin")

    def __init__(self, plugin: Plugin, name: str, disable: Callable[[], None]) -> None:
        self.name = name
        self.label = label(plugin)
        self.origin = plugin.origin
        self.kinds: Counter[str] = Counter()
        self.disabled = False
        self.last = ""
        self._disable = disable
        self._times: deque[float] = deque(maxlen=FAULT_LIMIT)

    def fault(self, kind: str, what: str) -> None:
        """Count a fault and say so. Mutates."""
        self.kinds[kind] += 1
        self.last = what
        now = time.monotonic()
        self._times.append(now)
        tail = ""
        if not self.disabled and len(self._times) == FAULT_LIMIT and now - self._times[0] <= FAULT_WINDOW:
            self.disabled = True
            self._disable()
            tail = f"; disabled after {self.kinds.total()} faults"
        default = "the answer stands" if kind == "slow" else "the default answers"
        log.warning("%s of %s: %s; %s%s", self.label, self.origin, what, default, tail)

    def summary(self) -> PluginFaults:
        """The faults so far."""
        kinds = dict(self.kinds)
        return PluginFaults(self.name, self.kinds.total(), self.disabled, self.origin, kinds, self.last)


class Impl:
    """A contained plugin's implementation of one hook, called with the hook's arguments in order."""

    __slots__ = ("budget", "call", "contained", "hook", "name", "plugin", "record", "watch")

    def __init__(self, hook: str, plugin: Plugin, call: Callable[..., Any], record: Record, budget: float) -> None:
        self.hook = hook
        self.plugin = plugin
        self.name = plugin.name
        self.call = call
        self.contained = True
        self.record = record
        self.budget = budget
        self.watch: Callable[[str, tuple[Any, ...]], Callable[[], str | None]] | None = None

    def ask(self, check: Callable[..., Any] | None, *args: Any) -> Any:
        """Its answer, checked; ``None`` where it raised or the answer was nonsense."""
        verdict = None if self.watch is None else self.watch(self.hook, args)
        start = time.perf_counter()
        try:
            answer = self.call(*args)
            if answer is not None and check is not None:
                answer = check(answer, *args)
        except Nonsense as error:
            self.fault("answered", f"{self.hook} answered {error}")
            answer = None
        except CONTAINED as error:
            self.fault("raised", f"raised {one_line(error)} (in {self.hook})")
            answer = None
        seconds = time.perf_counter() - start
        if seconds > self.budget:
            self.fault("slow", f"{self.hook} took {seconds:.3f} s, {self.budget:g} s is the limit")
        if verdict is not None and (changed := verdict()) is not None:
            self.fault("changed", f"{self.hook} {changed}")
            answer = None
        return answer

    def fault(self, kind: str, what: str) -> None:
        """Count a fault of the plugin."""
        self.record.fault(kind, what)


class RoleImpl(Impl):
    """The same of a plugin that plays a role: what it does wrong stops the engine, in words that name it."""

    __slots__ = ()

    def __init__(self, hook: str, plugin: Plugin, call: Callable[..., Any], record: Record, budget: float) -> None:
        super().__init__(hook, plugin, call, record, budget)
        self.contained = False

    def ask(self, check: Callable[..., Any] | None, *args: Any) -> Any:
        """Its answer, checked. Raises ``InvariantViolation`` where the answer is nonsense."""
        answer = self.call(*args)
        if answer is not None and check is not None:
            try:
                answer = check(answer, *args)
            except Nonsense as error:
                self.fault("answered", f"{self.hook} answered {error}")
        return answer

    def fault(self, kind: str, what: str) -> None:
        """Raise it."""
        raise InvariantViolation(f"{label(self.plugin)} of {self.plugin.origin}: {what}")


def started(plugin: Plugin, context: Context) -> None:
    """Start a plugin. Raises ``PluginError`` in its name where it raises anything that is no error of ours."""
    try:
        plugin.start(context)
    except EngineError:
        raise
    except CONTAINED as error:
        raise PluginError(f"{label(plugin)} of {plugin.origin} could not start: {one_line(error)}") from error


def diagnosed(error: Exception, plugins: Iterable[Plugin]) -> Exception:
    """The error as one that names the plugin in whose code it arose, if there is one; else the error itself.

    Errors of our own keep their class; anything else that a plugin raised becomes an ``InvariantViolation``. Subclasses
    of ``AssertionError`` are the language of test tools and pass as they are.
    """
    guilty = _innermost(error, list(plugins))
    if guilty is None or getattr(error, "named", False):
        return error
    if isinstance(error, AssertionError) and type(error) is not AssertionError:
        return error
    who = f"{label(guilty)} of {guilty.origin}"
    plain = isinstance(error, EngineError) and type(error).__init__ is Exception.__init__
    named: Exception = (
        type(error)(f"{who}: {error}") if plain else InvariantViolation(f"{who} raised {one_line(error)}")
    )
    named.named = True  # type: ignore[attr-defined]
    return named


class Naming:
    """``with``: an error that leaves the block is told in the name of the plugin whose code it came from.

    A class and not a generator, since every step enters it.
    """

    __slots__ = ("_plugins",)

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._plugins = tuple(plugins)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and (named := diagnosed(error, self._plugins)) is not error:
            raise named from error


def _innermost(error: Exception, plugins: list[Plugin]) -> Plugin | None:
    """The plugin whose method is deepest in the traceback."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = next((plugin for plugin in plugins if plugin is owner), found)
        trace = trace.tb_next
    return found
