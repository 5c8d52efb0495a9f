"""Finding plugins: entry points by role, selection by name or ``pkg.module:Class``, clear refusals.

Installed is not active: only what configuration selects is imported. What is asked for and broken stops the start; what
is broken and not asked for is a line in ``engine plugins``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import Any

from pydantic import ValidationError

from engine.core.config import Selection
from engine.core.contract import CONTRACT, Contract, check_hooks
from engine.core.discovery import Entry, given, installed
from engine.core.errors import ConfigError, PluginError, one_line, suggest
from engine.core.importing import load
from engine.core.peek import Peek, peek
from engine.core.protocols import GROUPS, ROLES, Plugin, PluginOptions

log = logging.getLogger(__name__)


SLOW_IMPORT = 5.0
"""Seconds that importing a selected plugin may take before the log names it."""

LOCAL = "local code"
BROKEN = (Exception, SystemExit)  # a module that exits when imported is broken too
BASES = frozenset(cls.__name__ for cls in ROLES.values())
ON_THE_BUS = ("scheduler", "kvcache", "connector", "policy")


@dataclass(frozen=True, slots=True)
class PluginListing:
    """One line of ``engine plugins``. ``status`` is ``ok``, ``broken`` or ``duplicate``; ``cause`` says why.

    ``notes`` are for those that work: what they use that is deprecated, what is odd about their metadata.
    """

    role: str
    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    target: str
    status: str = "ok"
    cause: str = ""
    summary: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin class and where it comes from; ``notes`` as in ``PluginListing``."""

    role: str
    cls: type[Plugin]
    distribution: str
    version: str
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Distribution and version, for people."""
        return f"{self.distribution} {self.version}".strip() or LOCAL


class Registry:
    """All plugins that are installed, by role. Their order is that of role, name, distribution and target.

    Args:
        entries: entry points to use instead of the installed ones (for tests).
        contract: the contract to hold them to.
        slow_import: seconds that importing a selected plugin may take before the log names it.
    """

    def __init__(
        self,
        entries: Iterable[EntryPoint] | None = None,
        *,
        contract: Contract | None = None,
        slow_import: float = SLOW_IMPORT,
    ) -> None:
        found = installed(GROUPS) if entries is None else given(entries, GROUPS)
        found = sorted(set(found), key=lambda entry: (entry.name, entry.distribution, entry.target))
        self._entries = {role: [entry for entry in found if entry.role == role] for role in GROUPS}
        self._contract = CONTRACT if contract is None else contract
        self._slow_import = slow_import
        self._checked: dict[Entry, tuple[type, Found]] = {}

    def select(self, role: str, name: str) -> Found:
        """The class that plays ``role`` under ``name``: an entry point, an alias, or ``pkg.module:Class``.

        Nothing is constructed, and a plugin whose source says that it is of another contract version is not imported.

        Raises:
            PluginError: unknown (with a suggestion), ambiguous, broken, or written for another contract version.
        """
        if ":" in name:
            return self._selected(Entry(role, name, name, LOCAL))
        named = [entry for entry in self._entries[role] if entry.name == name] or self._by_alias(role, name)
        if not named:
            raise PluginError(
                f"unknown {role} {name!r}: {suggest(name, self.names(role))}{self._elsewhere(role, name)}"
            )
        if len(named) > 1:
            owners = " and ".join(f"{entry.distribution} ({entry.target})" for entry in named)
            fix = named[0].note or "uninstall one, or select it as module:Class"
            raise PluginError(f"{role} {name!r} is provided twice, by {owners}: {fix}")
        return self._selected(named[0])

    def names(self, role: str) -> list[str]:
        """Names that configuration can select for a role."""
        return sorted({entry.name for entry in self._entries[role]})

    def owners(self) -> list[tuple[str, str, str]]:
        """(role, name, distribution) of every installed plugin. Imports none of them."""
        return [(role, entry.name, entry.distribution) for role, found in self._entries.items() for entry in found]

    def named(self, name: str) -> list[tuple[str, str]]:
        """(role, name) of every plugin of that name; only where there is none, of those with that alias."""
        found = dict.fromkeys((role, own) for role, own, _ in self.owners() if own == name)
        return list(found) or [(role, entry.name) for role in self._entries for entry in self._by_alias(role, name)]

    def providers(self, capability: str) -> list[Entry]:
        """Installed plugins that provide it. Imports only those whose source does not say what they provide."""
        return [
            entry
            for found in self._entries.values()
            for entry in found
            if capability in (self._says(entry).provides or ())
        ]

    def listing(self) -> list[PluginListing]:
        """Every installed plugin, in the registry's order; each is imported to see whether it works."""
        return [
            self._line(entry, [other for other in entries if other.name == entry.name and other is not entry])
            for entries in self._entries.values()
            for entry in entries
        ]

    def _line(self, entry: Entry, others: Sequence[Entry]) -> PluginListing:
        line = PluginListing(entry.role, entry.name, (), entry.distribution, entry.version, entry.target)
        try:
            found = self._found(entry)
        except PluginError as error:
            return replace(line, status="broken", cause=str(error))
        summary = (found.cls.__doc__ or "").strip().split("\n")[0]
        line = replace(line, aliases=tuple(found.cls.aliases), notes=found.notes)
        if others:
            whose = " and ".join(f"{other.distribution} ({other.target})" for other in others)
            return replace(line, status="duplicate", cause=f"{whose} provides the same name", summary=summary)
        return replace(line, summary="; ".join((summary, *found.notes)))

    def _selected(self, entry: Entry) -> Found:
        found = self._found(entry, slow=self._slow_import)
        who = f"{entry.role} {entry.name!r} of {found.origin}"
        if entry.note:
            log.warning("%s: %s", who, entry.note)
        self._contract.warn(found.cls, who)
        return found

    def _found(self, entry: Entry, slow: float | None = None) -> Found:
        """Import and check. ``slow``: the log names it if that takes so many seconds. Raises ``PluginError``."""
        who = f"{entry.role} {entry.name!r} of {entry.distribution}"
        imported = entry.target.partition(":")[0] in sys.modules
        said = None if imported else peek(entry.target, BASES).requires_api
        if said is not None and (refusal := self._contract.refusal(said)):
            raise PluginError(self._refused(who, entry, refusal))
        try:
            cls, seconds = load(entry.target)
        except BROKEN as error:
            fix = entry.note or _repair(entry, error)
            raise PluginError(f"{who} cannot be imported from {entry.target}: {one_line(error)}; {fix}") from error
        if slow is not None and seconds > slow:
            log.warning("%s took %.1f s to import (%s)", who, seconds, entry.target)
        checked = self._checked.get(entry)
        if checked is None or checked[0] is not cls:
            checked = self._checked[entry] = (cls, self._verified(who, entry, cls))
        return checked[1]

    def _verified(self, who: str, entry: Entry, cls: Any) -> Found:
        """The class held to the contract. Raises ``PluginError``; constructs nothing."""
        check_class(who, entry.role, cls)
        if refusal := self._contract.refusal(cls.requires_api):
            raise PluginError(self._refused(who, entry, refusal))
        try:
            notes = tuple(str(item) for item in self._contract.uses(cls))
            check_hooks(cls, [*ROLES.values(), Plugin], self._contract, asked=entry.role in ON_THE_BUS)
            adapted = self._contract.adapt(cls)
        except PluginError as error:
            raise PluginError(f"{who}: {error}; {_repair(entry)}") from error
        if missing := sorted(getattr(adapted, "__abstractmethods__", ())):
            raise PluginError(f"{who} does not implement {', '.join(missing)}, which its role {entry.role} needs")
        return Found(entry.role, adapted, entry.distribution, entry.version, (*notes, *filter(None, [entry.note])))

    def _refused(self, who: str, entry: Entry, refusal: str) -> str:
        release = "a release" if entry.distribution == LOCAL else f"a release of {entry.distribution}"
        return f"{who} {refusal}: install {release} for {self._contract.version}"

    def _says(self, entry: Entry) -> Peek:
        """Aliases and capabilities, off the source or else off the class; empty where that is broken."""
        said = peek(entry.target, BASES)
        if said.aliases is None or said.provides is None:
            try:
                cls = self._found(entry).cls
            except PluginError:  # reported by listing(), and by select() when asked for by name
                return Peek((), frozenset(), frozenset())
            said = Peek(tuple(cls.aliases), frozenset(cls.provides), frozenset(cls.requires))
        return said

    def _by_alias(self, role: str, alias: str) -> list[Entry]:
        return [entry for entry in self._entries[role] if alias in (self._says(entry).aliases or ())]

    def _elsewhere(self, role: str, name: str) -> str:
        """A hint where the name is that of a plugin of another role."""
        others = sorted({its for its, own, _ in self.owners() if own == name and its != role})
        return f" ({name!r} is a {' and a '.join(others)})" if others else ""


def _repair(entry: Entry, error: BaseException | None = None) -> str:
    if entry.distribution != LOCAL:
        return f"repair or uninstall {entry.distribution}"
    module = entry.target.partition(":")[0]
    missing = error.name if isinstance(error, ModuleNotFoundError) else None  # it, or what it imports itself
    return "is its folder on PYTHONPATH?" if missing and f"{module}.".startswith(f"{missing}.") else "repair it"


def check_class(who: str, role: str, cls: Any) -> None:
    """Raise ``PluginError`` where ``cls`` is no class of the role, or declares what it cannot."""
    base = ROLES[role]
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise PluginError(f"{who}: {cls!r} is not a subclass of engine.core.{base.__name__}")
    for field in ("aliases", "provides", "requires"):
        value = getattr(cls, field)
        if not isinstance(value, tuple | list | set | frozenset) or not all(isinstance(item, str) for item in value):
            raise PluginError(f"{who}: its {field} must be a set of words, not {value!r:.80}")
    if not isinstance(cls.name, str):
        raise PluginError(f"{who}: its name must be a word, not {cls.name!r:.80}")
    if not (isinstance(cls.Options, type) and issubclass(cls.Options, PluginOptions)):
        raise PluginError(f"{who}: its Options are not a subclass of engine.core.PluginOptions")


def build(found: Found, selection: Selection) -> Plugin:
    """Make the plugin with its validated options.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a bad value.
        PluginError: its constructor raised.
    """
    prefix = f"{found.role} {selection.name!r}"
    known = found.cls.Options.model_fields
    for key in selection.options:
        if key not in known:
            raise ConfigError(f"{prefix} has no option {key!r}: {suggest(key, known)}")
    try:
        options = found.cls.Options(**selection.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{prefix}, option {key}: {first['msg']}, got {first['input']!r}") from error
    try:
        plugin = found.cls(options)
    except ConfigError:
        raise
    except BROKEN as error:
        raise PluginError(f"{prefix} of {found.distribution} cannot be made: {one_line(error)}") from error
    plugin.origin = found.origin
    return plugin


def make(role: str, name: str, options: Mapping[str, Any] | None = None) -> Plugin:
    """An installed plugin by name, with its options. Raises as ``Registry.select`` and ``build`` do."""
    return build(_installed(tuple(sys.path)).select(role, name), Selection(name=name, options=dict(options or {})))


@lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> Registry:
    """What is installed on this path, looked up once a process."""
    return Registry()
