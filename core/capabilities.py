"""Who provides what, who requires it, what is missing, and what is less than was asked for: resolved before a start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine.core.contract import CONTRACT, HOOKS, MARK
from engine.core.errors import PluginError
from engine.core.protocols import ROLES, Attention, Executor, KVCache, Plugin, Policy

if TYPE_CHECKING:
    from engine.core.registry import Registry

OWNERS: tuple[tuple[str, type[Plugin]], ...] = (
    ("prefix-cache", KVCache),
    ("model-runner", Executor),
    ("attention:", Attention),
)
"""Capabilities that the core knows (or how their names begin), and the only role that can have them."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A word, who provides it and who requires it."""

    name: str
    providers: tuple[str, ...]
    requirers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """What a plugin requires and no selected plugin provides. ``fix`` names installed plugins that would."""

    capability: str
    plugin: str
    distribution: str
    fix: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the selected plugins make together.

    Attributes:
        plugins: ``role 'name'`` and origin of each, in the order of the configuration.
        capabilities: what is provided or required, by name.
        missing: what stops the start.
        false: claims that cannot be true; they stop the start too.
        downgrades: what is less than was asked for, in words. The engine starts, and says so.
        notes: what works for now: deprecations, odd metadata.
    """

    plugins: tuple[tuple[str, str], ...]
    capabilities: tuple[Capability, ...]
    missing: tuple[Missing, ...] = ()
    false: tuple[str, ...] = ()
    downgrades: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    contract: str = CONTRACT.version

    @property
    def ok(self) -> bool:
        """Whether an engine can start with them."""
        return not self.missing and not self.false

    def text(self) -> str:
        """The report, for people: a line a fact."""
        lines = [f"contract {self.contract}", *(f"plugin {name} from {origin}" for name, origin in self.plugins)]
        for item in self.capabilities:
            whose = f"provided by {', '.join(item.providers)}" if item.providers else "PROVIDED BY NOBODY"
            wanted = f", required by {', '.join(item.requirers)}" if item.requirers else ""
            lines.append(f"capability {item.name}: {whose}{wanted}")
        lines += [f"MISSING {problem(item)}" for item in self.missing]
        lines += [f"FALSE {claim}" for claim in self.false]
        lines += [f"DOWNGRADE {words}" for words in self.downgrades]
        lines += [f"note {words}" for words in self.notes]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The report as plain values: part of an engine's description."""
        return asdict(self)

    def raise_if_not_ok(self) -> None:
        """Raise ``PluginError`` with everything that stops the start."""
        if not self.ok:
            raise PluginError("; ".join([*map(problem, self.missing), *self.false]))


def problem(item: Missing) -> str:
    """A missing capability in a sentence."""
    who = f"{item.plugin} of {item.distribution}"
    return f"{who} requires {item.capability}, which no selected plugin provides: {item.fix}"


def report(
    plugins: Sequence[Plugin],
    registry: Registry | None = None,
    *,
    downgrades: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Report:
    """Resolve what the plugins provide and require. Raises nothing: see ``Report.raise_if_not_ok``.

    Args:
        plugins: those that were selected.
        registry: where to look for who would provide what is missing; without it the fix is less exact.
        downgrades: words on what the caller could not give.
        notes: words on what works for now.
    """
    providers: dict[str, list[str]] = {}
    requirers: dict[str, list[str]] = {}
    missing: list[Missing] = []
    offered = {capability for plugin in plugins for capability in plugin.provides}
    for plugin in plugins:
        for capability in sorted(plugin.provides):
            providers.setdefault(capability, []).append(label(plugin))
        for capability in sorted(plugin.requires):
            requirers.setdefault(capability, []).append(label(plugin))
            if capability not in offered:
                missing.append(Missing(capability, label(plugin), plugin.origin, _fix(plugin, capability, registry)))
    return Report(
        plugins=tuple((label(plugin), plugin.origin) for plugin in plugins),
        capabilities=tuple(
            Capability(name, tuple(providers.get(name, ())), tuple(requirers.get(name, ())))
            for name in sorted({*providers, *requirers})
        ),
        missing=tuple(missing),
        false=tuple(_false(plugins)),
        downgrades=(*downgrades, *_downgrades(plugins, requirers)),
        notes=tuple(notes),
    )


def check_capabilities(plugins: Sequence[Plugin], registry: Registry | None = None) -> None:
    """Raise ``PluginError`` where a plugin requires what no selected plugin provides, or claims what it cannot have."""
    report(plugins, registry).raise_if_not_ok()


def label(plugin: Plugin) -> str:
    """``policy 'k-lpm'``."""
    return f"{role_of(plugin)} {(plugin.name or type(plugin).__name__)!r}"


def role_of(plugin: Plugin) -> str:
    """The name of the role that it plays."""
    return next((role for role, base in ROLES.items() if isinstance(plugin, base)), "plugin")


def _fix(plugin: Plugin, capability: str, registry: Registry | None) -> str:
    leave = f"leave out {label(plugin)}"
    if registry is None:
        return f"select one that does, or {leave}"
    known = [f"{entry.role} {entry.name!r} ({entry.distribution})" for entry in registry.providers(capability)]
    return f"select {' or '.join(known)}, or {leave}" if known else f"no installed plugin does either: {leave}"


def _false(plugins: Sequence[Plugin]) -> Iterable[str]:
    """Claims of what only another role can have."""
    for plugin in plugins:
        for capability in sorted(plugin.provides):
            for word, role in OWNERS:
                mine = capability.startswith(word) if word.endswith(":") else capability == word
                if mine and not isinstance(plugin, role):
                    yield (
                        f"{label(plugin)} of {plugin.origin} claims to provide {capability}, which only a "
                        f"{role.__name__} can: repair or leave out {label(plugin)}"
                    )


def _downgrades(plugins: Sequence[Plugin], requirers: dict[str, list[str]]) -> Iterable[str]:
    for plugin in plugins:
        if isinstance(plugin, KVCache) and not plugin.caching:
            wanted = requirers.get("prefix-cache")
            tail = f": {', '.join(wanted)} will find nothing" if wanted else ""
            yield f"{label(plugin)} was told to remember no prefixes{tail}"
        if isinstance(plugin, Policy) and not any(
            hasattr(getattr(plugin, name, None), MARK) for name in (*HOOKS, *vars(type(plugin)))
        ):
            yield f"{label(plugin)} answers no hook: it does nothing"


__all__ = ["HOOKS", "Capability", "Missing", "Report", "check_capabilities", "label", "problem", "report"]
