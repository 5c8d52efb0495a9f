"""The contract's version in force: who may run, what plugins use that is deprecated, and how it is kept working.

All of it happens when a plugin is selected or registered. A step costs nothing more.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakSet

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from engine.core import hookspecs
from engine.core.errors import PluginDeprecationWarning, PluginError, suggest
from engine.core.version import API_VERSION, DEPRECATIONS, Deprecation, split

log = logging.getLogger(__name__)

HOOKS = ("plan", "order", "admit", "evict", "commit", "transfer_kv")
ADAPTED = "__adapted__"  # on a class that ``Contract.adapt`` made: the plugin's own
MARK = f"{hookspecs.PROJECT}_impl"


def parameters(hook: str) -> tuple[str, ...]:
    """Names of a hook's parameters, in order."""
    return tuple(inspect.signature(getattr(hookspecs, hook)).parameters)


class Contract:
    """One version of the contract and its deprecations.

    Args:
        version: ``MAJOR.MINOR``.
        deprecations: see ``version.Deprecation``.
    """

    def __init__(self, version: str = API_VERSION, deprecations: Iterable[Deprecation] = DEPRECATIONS) -> None:
        self.version = version
        self._deprecations = tuple(deprecations)
        self._warned: WeakSet[type] = WeakSet()

    @property
    def kept(self) -> str | None:
        """The minor version before, which is still offered; ``None`` where there is none."""
        major, minor = split(self.version)
        return f"{major}.{minor - 1}" if minor else None

    def refusal(self, wanted: str) -> str | None:
        """Why a plugin with this ``requires_api`` cannot run here; ``None`` where it can."""
        try:
            accepted = SpecifierSet(wanted)
        except Exception:  # a value of a wrong type raises whatever it likes
            return f"requires_api {wanted!r} is not a version range such as '>=1.0,<2'"
        if accepted.contains(Version(self.version)):
            return None
        excluded = any(part.operator == "!=" and not part.contains(self.version) for part in accepted)
        if self.kept is not None and not excluded and accepted.contains(Version(self.kept)):
            return None
        offers = self.version if self.kept is None else f"{self.version} and keeps {self.kept}"
        return f"was written for contract {wanted}, this engine offers {offers}"

    def uses(self, cls: type) -> tuple[Deprecation, ...]:
        """What the class uses that is deprecated. Raises ``PluginError`` for what is gone already."""
        used = [item for item in self._deprecations if self._in_force(item) and _uses(cls, item)]
        for item in used:
            if self._gone(item):
                raise PluginError(f"it uses {item}")
        return tuple(used)

    def adapt(self, cls: type) -> type:
        """The class with its deprecated methods and attributes answering under their new names, or the class itself."""
        body: dict[str, Any] = {}
        for item in self.uses(cls):
            if item.kind == "attribute":
                body[item.instead] = getattr(cls, item.name)
            elif item.kind == "method":
                body[item.instead] = _forward(item)
        if not body:
            return cls
        body |= {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(cls)(cls.__name__, (cls,), {**body, ADAPTED: cls})

    def warn(self, cls: type, who: str) -> None:
        """Say once a class what it uses that is deprecated: a ``PluginDeprecationWarning``, and a line in the log."""
        used = self.uses(cls)
        root = getattr(cls, ADAPTED, cls)
        if not used or root in self._warned:
            return
        self._warned.add(root)
        words = f"{who} uses what contract {self.version} deprecates: {'; '.join(map(str, used))}"
        log.warning("%s", words)
        warnings.warn(words, PluginDeprecationWarning, stacklevel=2)

    def specs(self) -> Any:
        """The hook specifications for pluggy, deprecated parameters included."""
        return SimpleNamespace(**{hook: _extended(getattr(hookspecs, hook), self._parameters(hook)) for hook in HOOKS})

    def caller(self, hook: str, function: Callable[..., Any], wanted: Sequence[str]) -> Callable[..., Any]:
        """An implementation as a callable of the hook's arguments in order, whichever of them it wants."""
        spec = parameters(hook)
        if tuple(wanted) == spec:
            return function
        old = self._parameters(hook)
        places = [spec.index(name) if name in spec else _value(old[name], spec) for name in wanted]

        def call(*args: Any) -> Any:
            return function(*[args[place] if isinstance(place, int) else place(args) for place in places])

        return call

    def _parameters(self, hook: str) -> dict[str, Deprecation]:
        return {
            item.name: item
            for item in self._deprecations
            if item.kind == "parameter" and item.owner == hook and self._in_force(item) and not self._gone(item)
        }

    def _in_force(self, item: Deprecation) -> bool:
        return split(self.version) >= split(item.since)

    def _gone(self, item: Deprecation) -> bool:
        return split(self.version) >= split(item.removed)


CONTRACT = Contract()
"""The contract that this engine offers."""


class DeprecatedField:
    """A field of an exchanged object that plugins should no longer read: it still answers, and says who reads it.

    Put it on the class in the place of the old name. Costs nothing until it is read.

    Args:
        item: the entry in the table.
        read: the object to the old field's value.
    """

    def __init__(self, item: Deprecation, read: Callable[[Any], Any]) -> None:
        self._item, self._read = item, read
        self._told: set[str] = set()

    def __get__(self, thing: Any, owner: type) -> Any:
        if thing is None:
            return self
        reader = str(sys._getframe(1).f_globals.get("__name__", "unknown code"))
        if reader not in self._told:
            self._told.add(reader)
            words = f"{reader} reads {self._item}"
            log.warning("%s", words)
            warnings.warn(words, PluginDeprecationWarning, stacklevel=2)
        return self._read(thing)


def check_hooks(cls: type, bases: Sequence[type], contract: Contract = CONTRACT, *, asked: bool = True) -> None:
    """Raise ``PluginError`` where the class answers a hook that does not exist, or with a parameter that it has not.

    Also where it would never be asked: a method of a hook's name that is not marked, a role that hooks do not reach
    (``asked`` false). Constructs nothing.
    """
    for name in dir(cls):
        value = inspect.getattr_static(cls, name, None)
        mark = getattr(value, MARK, None)
        if mark is None:
            ours = any(inspect.getattr_static(base, name, None) is value for base in bases)
            if asked and name in HOOKS and callable(value) and not ours:
                raise PluginError(f"its method {name!r} is not decorated with hookimpl: it would never be asked")
            continue
        hook = mark.get("specname") or name
        if hook not in HOOKS:
            if mark.get("optionalhook"):
                continue
            raise PluginError(f"it answers the hook {hook!r}, which does not exist: {suggest(hook, HOOKS)}")
        if not asked:
            raise PluginError(f"it answers the hook {hook!r}, but its role is not asked: make it a policy")
        known = {*parameters(hook), *contract._parameters(hook)}
        if isinstance(value, FunctionType):
            wanted = list(inspect.signature(value).parameters.values())[1:]
            for parameter in wanted:
                if parameter.default is parameter.empty and parameter.name not in known:
                    raise PluginError(
                        f"its answer to {hook!r} takes {parameter.name!r}, which the hook does not have: "
                        f"{suggest(parameter.name, known)}"
                    )


def _uses(cls: type, item: Deprecation) -> bool:
    if item.kind == "field":
        return False  # seen when it is read
    if item.kind == "parameter":
        for name in dir(cls):
            value = inspect.getattr_static(cls, name, None)
            mark = getattr(value, MARK, None)
            if mark is not None and (mark.get("specname") or name) == item.owner:
                return callable(value) and item.name in inspect.signature(value).parameters
        return False
    owners = [base for base in cls.__mro__ if base.__name__ == item.owner and base.__module__.startswith("engine.")]
    above = {base for owner in owners for base in owner.__mro__}
    return bool(owners) and any(item.name in vars(base) for base in cls.__mro__ if base not in above)


def _forward(item: Deprecation) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, item.name)(*args, **kwargs)

    method.__name__ = item.instead
    method.__doc__ = f"Answers as {item.name!r}, its deprecated name."
    return method


def _value(item: Deprecation, spec: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
    """The value of a deprecated parameter, made of the hook's arguments."""
    adapt = item.adapt
    if adapt is None:
        place = spec.index(item.instead)
        return lambda args: args[place]
    return lambda args: adapt(dict(zip(spec, args, strict=True)))


def _extended(function: Any, more: Iterable[str]) -> Any:
    """A hook's specification with more parameters. pluggy reads their names off the code object."""
    if not (added := tuple(more)):
        return function
    code = function.__code__
    names = (*code.co_varnames[: code.co_argcount], *added)
    twin = FunctionType(
        code.replace(co_argcount=len(names), co_nlocals=len(names), co_varnames=names),
        function.__globals__, function.__name__,
    )  # fmt: skip
    twin.__dict__.update(function.__dict__)
    return twin
