"""Finding plugins: entry points by role, selection by name or ``pkg.module:Class``, clear refusals.

Installed is not active: only what configuration selects is imported. What is asked for and broken stops the start; what
is broken and not asked for is a line in ``engine plugins``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import ValidationError

from engine.core.config import Selection
from engine.core.errors import ConfigError, PluginError, suggest
from engine.core.protocols import GROUPS, ROLES, Plugin
from engine.core.version import API_VERSION


@dataclass(frozen=True, slots=True)
class PluginListing:
    """One line of ``engine plugins``. ``status`` is ``ok``, ``broken`` or ``duplicate``; ``cause`` says why."""

    role: str
    name: str
    aliases: tuple[str, ...]
    distribution: str
    version: str
    target: str
    status: str = "ok"
    cause: str = ""
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin class and where it comes from."""

    role: str
    cls: type[Plugin]
    distribution: str
    version: str


class Registry:
    """All plugins that are installed, by role.

    Args:
        entries: entry points to use instead of the installed ones (for tests).
    """

    def __init__(self, entries: Iterable[EntryPoint] | None = None) -> None:
        given = None if entries is None else list(entries)
        self._entries: dict[str, list[EntryPoint]] = {}
        for role, group in GROUPS.items():
            found = entry_points(group=group) if given is None else [e for e in given if e.group == group]
            self._entries[role] = sorted(found, key=lambda entry: (entry.name, _distribution(entry)))

    def select(self, role: str, name: str) -> Found:
        """The class that plays ``role`` under ``name``: an entry point, an alias, or ``pkg.module:Class``.

        Raises:
            PluginError: unknown (with a suggestion), ambiguous, broken, or written for another contract version.
        """
        if ":" in name:
            return self._checked(role, name, _import(role, name, name, "local code"), "local code", "")
        named = [entry for entry in self._entries[role] if entry.name == name]
        if not named:
            named = self._by_alias(role, name)
        if not named:
            raise PluginError(f"unknown {role} {name!r}: {suggest(name, self.names(role))}")
        if len({(entry.value, _distribution(entry)) for entry in named}) > 1:
            owners = " and ".join(f"{_distribution(entry)} ({entry.value})" for entry in named)
            raise PluginError(
                f"{role} {name!r} is provided twice, by {owners}: uninstall one, or select it as module:Class"
            )
        entry = named[0]
        cls = _import(role, name, entry.value, _distribution(entry))
        return self._checked(role, name, cls, _distribution(entry), _version(entry))

    def names(self, role: str) -> list[str]:
        """Names that configuration can select for a role."""
        return sorted({entry.name for entry in self._entries[role]})

    def owners(self) -> list[tuple[str, str, str]]:
        """(role, name, distribution) of every installed plugin. Imports none of them."""
        return [(role, entry.name, _distribution(entry)) for role, found in self._entries.items() for entry in found]

    def named(self, name: str) -> list[tuple[str, str]]:
        """(role, name) of every plugin of that name; only where there is none, of those with that alias."""
        found = dict.fromkeys((role, own) for role, own, _ in self.owners() if own == name)
        return list(found) or [(role, entry.name) for role in self._entries for entry in self._by_alias(role, name)]

    def listing(self) -> list[PluginListing]:
        """Every installed plugin; each is imported to see whether it works."""
        lines = []
        for role, entries in self._entries.items():
            seen: dict[str, int] = {}
            for entry in entries:
                seen[entry.name] = seen.get(entry.name, 0) + 1
            for entry in entries:
                lines.append(self._line(role, entry, duplicate=seen[entry.name] > 1))
        return lines

    def _line(self, role: str, entry: EntryPoint, *, duplicate: bool) -> PluginListing:
        where = (role, entry.name)
        try:
            found = self._checked(
                role, entry.name, _import(role, entry.name, entry.value, _distribution(entry)), "", ""
            )
        except PluginError as error:
            return PluginListing(*where, (), _distribution(entry), _version(entry), entry.value, "broken", str(error))
        summary = (found.cls.__doc__ or "").strip().split("\n")[0]
        status, cause = ("duplicate", "another distribution provides the same name") if duplicate else ("ok", "")
        aliases = found.cls.aliases
        return PluginListing(
            *where, aliases, _distribution(entry), _version(entry), entry.value, status, cause, summary
        )

    def _by_alias(self, role: str, alias: str) -> list[EntryPoint]:
        """Aliases live on the classes, so looking one up imports the role's plugins; broken ones have none."""
        found = []
        for entry in self._entries[role]:
            try:
                cls = _import(role, entry.name, entry.value, _distribution(entry))
            except PluginError:
                continue  # it is reported by listing(), and by select() when asked for by name
            if alias in getattr(cls, "aliases", ()):
                found.append(entry)
        return found

    @staticmethod
    def _checked(role: str, name: str, cls: Any, distribution: str, version: str) -> Found:
        base = ROLES[role]
        origin = f"{role} {name!r}" + (f" of {distribution}" if distribution else "")
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise PluginError(f"{origin}: {cls!r} is not a subclass of engine.core.{base.__name__}")
        try:
            wanted = SpecifierSet(cls.requires_api)
        except InvalidSpecifier as error:
            raise PluginError(f"{origin}: requires_api {cls.requires_api!r} is not a version range") from error
        if not wanted.contains(Version(API_VERSION)):
            raise PluginError(
                f"{origin} was written for contract {cls.requires_api}, this engine offers {API_VERSION}: "
                f"install a release of {distribution or name} for {API_VERSION}"
            )
        return Found(role, cls, distribution, version)


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
        return found.cls(options)
    except Exception as error:
        raise PluginError(f"{prefix} of {found.distribution}: {type(error).__name__}: {error}") from error


def make(role: str, name: str, options: Mapping[str, Any] | None = None) -> Plugin:
    """An installed plugin by name, with its options. Raises as ``Registry.select`` and ``build`` do."""
    return build(_installed(tuple(sys.path)).select(role, name), Selection(name=name, options=dict(options or {})))


@lru_cache(maxsize=1)
def _installed(_path: tuple[str, ...]) -> Registry:
    """What is installed on this path, looked up once a process."""
    return Registry()


def check_capabilities(plugins: Sequence[Plugin]) -> None:
    """Raise ``PluginError`` where a plugin requires what no selected plugin provides."""
    offered = {capability for plugin in plugins for capability in plugin.provides}
    for plugin in plugins:
        missing = sorted(plugin.requires - offered)
        if missing:
            raise PluginError(
                f"plugin {plugin.name!r} requires {', '.join(missing)}; the selected plugins provide "
                f"{', '.join(sorted(offered)) or 'nothing'}"
            )


def _import(role: str, name: str, target: str, distribution: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:
        raise PluginError(
            f"{role} {name!r} of {distribution} cannot be imported from {target}: {type(error).__name__}: {error}; "
            f"repair or uninstall {distribution}"
        ) from error
    return value


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown distribution"


def _version(entry: EntryPoint) -> str:
    return entry.dist.version if entry.dist is not None else ""
