"""Layers of configuration, one over the other: what each says, whose options it sets, and who said it last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from engine.core.errors import ConfigError, suggest


class Said(NamedTuple):
    """A value and who said it: ``file PATH``, ``environment NAME``, ``flag --NAME``."""

    value: Any
    origin: str


@dataclass
class Pick:
    """A selected plugin with the options that were set for it."""

    name: str
    origin: str
    options: dict[str, Said] = field(default_factory=dict)


def same_name(text: str) -> str:
    """Names that differ only in case, dashes and underscores are the same: a variable cannot be written otherwise."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


class One:
    """A role that one plugin plays. Selecting another plugin drops the options that were meant for the one before;
    options that came before anything was selected are for whoever is selected at last."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.chosen: Said | None = None
        self.options: dict[str, Said] = {}

    def select(self, value: Any, origin: str) -> None:
        """A name, or a table with options and perhaps a name."""
        if isinstance(value, Mapping):
            if "name" in value:
                self.select(value["name"], origin)
            for key, said in value.items():
                if key != "name":
                    self.option(key, said, origin)
            return
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.role} ({origin}): must be a plugin's name, not {value!r}")
        if self.chosen is not None and self.chosen.value != value:
            self.options = {}
        self.chosen = Said(value, origin)

    def option(self, path: str, value: Any, origin: str) -> None:
        """Set an option of whoever is selected."""
        self.options[path.replace("-", "_")] = Said(value, origin)


class Many:
    """A role that any number of plugins play. A layer that selects replaces the selection of those below it; who stays
    keeps the options. Options are set by the plugin's name, before or after it is selected."""

    def __init__(self, role: str, singular: str) -> None:
        self.role, self._singular = role, singular
        self.chosen: Said | None = None
        self.picks: list[Pick] = []
        self._early: dict[str, dict[str, Said]] = {}  # options of plugins that are not selected yet, by name as given

    def select(self, value: Any, origin: str) -> None:
        """Names (``a,b`` or a list), tables with a ``name``, or a table of tables by name."""
        before = {same_name(pick.name): pick.options for pick in self.picks}
        early = {same_name(name): options for name, options in self._early.items()}
        self.picks = []
        for pick in self._read(value, origin):
            key = same_name(pick.name)
            kept = {} if self._selected(pick.name) else {**before.get(key, {}), **early.get(key, {})}
            pick.options = {**kept, **pick.options}
            self.picks.append(pick)
        self._early = {name: options for name, options in self._early.items() if not self._selected(name)}
        self.chosen = Said([pick.name for pick in self.picks], origin)

    def option(self, path: str, value: Any, origin: str) -> None:
        """Set an option by ``NAME.OPTION``."""
        name, _, option = path.rpartition(".")
        if not name or not option:
            raise ConfigError(
                f"{self.role}.{path} ({origin}): names no option; write --{self._singular}.NAME.OPTION VALUE, or "
                f"select a plugin with --{self._singular} NAME"
            )
        found = self._selected(name)
        if len(found) > 1:
            raise ConfigError(
                f"{self.role}.{path} ({origin}): {found[0].name!r} is selected {len(found)} times; set its options in "
                f"the tables of a file"
            )
        options = found[0].options if found else self._early.setdefault(name, {})
        options[option.replace("-", "_")] = Said(value, origin)

    def check(self) -> None:
        """Raise ``ConfigError`` where options were set for a plugin that nobody selected, then or later."""
        for name, options in self._early.items():
            option, said = next(iter(options.items()))
            near = get_close_matches(same_name(name), [pick.name for pick in self.picks], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"select it with --{self._singular} {name}"
            raise ConfigError(
                f"{self.role}.{name}.{option} ({said.origin}): {self._singular} {name!r} is not selected: {hint}"
            )

    def _selected(self, name: str) -> list[Pick]:
        return [pick for pick in self.picks if same_name(pick.name) == same_name(name)]

    def _read(self, value: Any, origin: str) -> Iterable[Pick]:
        if isinstance(value, Mapping):
            for name, options in value.items():
                if not isinstance(options, Mapping):
                    raise ConfigError(f"{self.role}.{name} ({origin}): must be a table of options, not {options!r}")
                yield self._pick(name, options, origin)
            return
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, Sequence):
            raise ConfigError(f"{self.role} ({origin}): must be a list of names or tables, not {value!r}")
        for part in parts:
            if isinstance(part, str):
                yield from (Pick(name.strip(), origin) for name in part.split(",") if name.strip())
            elif isinstance(part, Mapping) and isinstance(part.get("name"), str):
                yield self._pick(part["name"], {k: v for k, v in part.items() if k != "name"}, origin)
            else:
                raise ConfigError(f"{self.role} ({origin}): a table needs a 'name' that selects the plugin: {part!r}")

    @staticmethod
    def _pick(name: str, options: Mapping[str, Any], origin: str) -> Pick:
        return Pick(name, origin, {key.replace("-", "_"): Said(value, origin) for key, value in options.items()})


class Layers:
    """All that was said so far. Later layers win, key by key.

    Args:
        fields: the keys that there are.
        one: those that select one plugin.
        many: those that select several, each with the name of its flag.
    """

    def __init__(self, fields: Iterable[str], one: Iterable[str], many: Mapping[str, str]) -> None:
        self._known = list(fields)
        self._plural = {singular: role for role, singular in many.items()}
        self.values: dict[str, Said] = {}
        self.roles: dict[str, One | Many] = {role: One(role) for role in one}
        self.roles |= {role: Many(role, singular) for role, singular in many.items()}

    def add(self, said: Iterable[tuple[str, Any, str]]) -> None:
        """One layer: (dotted key, value, origin) each. What it selects counts before the options that it sets.

        Raises:
            ConfigError: an unknown key, or a value that selects nothing; names the origin.
        """
        items = list(said)
        for key, value, origin in items:
            if "." not in key:
                self._set(key, value, origin)
        for key, value, origin in items:
            if "." in key:
                self._set(key, value, origin)

    def _set(self, key: str, value: Any, origin: str) -> None:
        name, dot, path = key.partition(".")
        if dot and not path:
            raise ConfigError(f"unknown key {key!r} ({origin}): an option's name is missing")
        name = self._plural.get(name, name) if origin.startswith("flag") else name
        if name not in self._known:
            near = repr(self._plural[name]) if name in self._plural else None
            words = f"did you mean {near}?" if near else suggest(name, self._known)
            raise ConfigError(f"unknown key {key!r} ({origin}): {words}")
        role = self.roles.get(name)
        if role is None:
            if path or isinstance(value, Mapping):
                raise ConfigError(f"{key!r} ({origin}): {name} has no options")
            self.values[name] = Said(value, origin)
        elif path:
            role.option(path, value, origin)
        else:
            role.select(value, origin)
