"""The effective configuration as a whole: the options of every selected plugin, checked, with where each came from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from engine.core.config import ROLE_KEYS, SINGULAR, EngineConfig, LoadedConfig, Selection, flag_of, keys_of
from engine.core.errors import ConfigError, PluginError, suggest
from engine.core.handoff import OPTION, check_role, with_role
from engine.core.protocols import PluginOptions
from engine.core.registry import Found, Registry
from engine.core.values import HIDDEN, as_toml, is_secret

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Selected:
    """A plugin that a configuration selects. ``key`` is where its options are: ``scheduler``, ``policies.NAME``."""

    role: str
    key: str
    selection: Selection


@dataclass(frozen=True, slots=True)
class Chosen:
    """A selected plugin, found, with its options."""

    selected: Selected
    found: Found
    options: PluginOptions


def selected(
    registry: Registry, config: EngineConfig, fields: Collection[str] = EngineConfig.model_fields
) -> list[Selected]:
    """What an engine with this configuration would use, what is slow to import last.

    Args:
        fields: the configuration's fields that count.
    """
    several: list[Selected] = []
    for name, role in SINGULAR.items():
        picks: tuple[Selection, ...] = getattr(config, name)
        keys = keys_of(name, [pick.name for pick in picks])
        several += [Selected(role, key, pick) for key, pick in zip(keys, picks, strict=True) if name in fields]
    attending = ["attention"] if _attends(registry, config) else []
    roles = ["scheduler", "kvcache", "grammar", "frontend", "tool_parser", "executor", *attending]
    chosen = [Selected(role, role, getattr(config, role)) for role in roles if role in fields]
    return [*chosen[:2], *several, *chosen[2:]]


def _attends(registry: Registry, config: EngineConfig) -> bool:
    """Whether the executor wants an attention backend. One that does not work says so when it is selected."""
    try:
        return bool(getattr(registry.select("executor", config.executor.name).cls, "uses_attention", False))
    except PluginError:
        return False


def checked_options(found: Found, selected: Selected, origins: Mapping[str, str]) -> PluginOptions:
    """The options of a selected plugin, as its model has them.

    Raises:
        ConfigError: an unknown option (with a suggestion) or a bad value; names the origin.
    """
    prefix = f"{found.role} {selected.selection.name!r}"
    model, given = found.cls.Options, selected.selection.options

    def origin(key: str) -> str:
        said = origins.get(f"{selected.key}.{key}")
        return f" ({said})" if said else ""

    for key in given:
        if key not in model.model_fields:
            raise ConfigError(f"{prefix} has no option {key!r}{origin(key)}: {suggest(key, model.model_fields)}")
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        name = str(first["loc"][0]) if first["loc"] else ""
        secret = name in model.model_fields and is_secret(name, model.model_fields[name])
        got = "" if secret or first["type"] == "missing" else f", got {first['input']!r}"
        words = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            words = f"is required; set it with {flag_of(f'{selected.key}.{name}')}"
        where = f"{prefix}, option {key}{origin(name)}" if key else prefix
        raise ConfigError(f"{where}: {words}{got if key else ''}") from (None if secret else error)


class Effective:
    """A loaded configuration with its plugins found and their options checked.

    Args:
        loaded: the configuration.
        registry: what is installed.
        fields: the configuration's fields that count (a command may have no use for some).

    Attributes:
        plugins: the selected plugins with all their options.
        origins: dotted key -> where its value came from, for every key, ``default`` included.

    Raises:
        ConfigError: an option is unknown or its value is bad; names the origin.
        PluginError: a plugin is unknown, broken or incompatible.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        registry: Registry | None = None,
        fields: Collection[str] = EngineConfig.model_fields,
    ) -> None:
        registry = registry or Registry()
        self.config = loaded.config
        self.plugins: list[Chosen] = []
        origins, whose = dict(loaded.origins), loaded.origins.get("role", DEFAULT)
        for one in selected(registry, loaded.config, fields):
            found = registry.select(one.role, one.selection.name)
            if one.role == "connector":
                selection = with_role(one.selection, found.cls, loaded.config.role)
                origins |= {} if selection is one.selection else {f"{one.key}.{OPTION}": whose}
                one = replace(one, selection=selection)
            self.plugins.append(Chosen(one, found, checked_options(found, one, origins)))
        connectors = [chosen.found.cls for chosen in self.plugins if chosen.found.role == "connector"]
        if "connectors" in fields:
            check_role(loaded.config.role, connectors, registry, whose)
        self.origins = {key: origins.get(key, DEFAULT) for key, _ in self.values()}

    def values(self) -> Iterator[tuple[str, Any]]:
        """(dotted key, plain value) of everything; the options of a plugin after its role. Secrets are ``***``."""
        options = {chosen.selected.key: _plain(chosen.options) for chosen in self.plugins}
        for name, field in EngineConfig.model_fields.items():
            value = getattr(self.config, name)
            if name in ROLE_KEYS:
                yield name, value.name
                yield from _under(name, options.get(name, value.options))
            elif name in SINGULAR:
                yield name, [pick.name for pick in value]
                for key, pick in zip(keys_of(name, [pick.name for pick in value]), value, strict=True):
                    yield from _under(key, options.get(key, pick.options))
            else:
                yield name, HIDDEN if value not in (None, ()) and is_secret(name, field) else value

    def as_toml(self) -> str:
        """A file that configures the same, all defaults written out. Secrets are left out, with a comment."""
        options = {chosen.selected.key: chosen for chosen in self.plugins}
        lines: list[str] = []
        tables: list[str] = []
        for name, field in EngineConfig.model_fields.items():
            value = getattr(self.config, name)
            if name in ROLE_KEYS:
                tables += [f"\n[{name}]", *_table(value, options.get(name))]
            elif name in SINGULAR:
                lines += [] if value else [f"{name} = []"]
                for key, pick in zip(keys_of(name, [pick.name for pick in value]), value, strict=True):
                    tables += [f"\n[[{name}]]", *_table(pick, options.get(key))]
            else:
                secret = value not in (None, ()) and is_secret(name, field)
                lines += _line(name, HIDDEN if secret else value, field.default)
        return "\n".join([*lines, *tables]) + "\n"


def _under(key: str, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{key}.{option}", value) for option, value in options.items())


def _plain(options: PluginOptions) -> dict[str, Any]:
    values = options.model_dump(mode="json")
    return {
        name: HIDDEN if values[name] is not None and is_secret(name, field) else values[name]
        for name, field in type(options).model_fields.items()
    }


def _table(selection: Selection, chosen: Chosen | None) -> list[str]:
    lines = [f"name = {as_toml(selection.name)}"]
    if chosen is None:
        return lines + [f"{key} = {as_toml(value)}" for key, value in selection.options.items()]
    for option, value in _plain(chosen.options).items():
        field = type(chosen.options).model_fields[option]
        lines += _line(option, value, None if field.is_required() else field.get_default(call_default_factory=True))
    return lines


def _line(name: str, value: Any, default: Any) -> list[str]:
    """Nothing where there is nothing by default: TOML has no word for it. Where there would be something: ``none``."""
    if value == HIDDEN:
        return [f"# {name} is secret and not shown: set it"]
    return [] if value is None and default is None else [f"{name} = {as_toml(value)}"]
