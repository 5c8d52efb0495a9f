"""All combinations of what can be chosen: schedulers, caches, policies, options, limits, rates."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from engine.core.config import ROLE_KEYS, SINGULAR, EngineConfig, LoadedConfig, Selection, keys_of
from engine.core.effective import Effective
from engine.core.errors import ConfigError, suggest
from engine.core.registry import Registry
from engine.lab.jobs import Job, plain

RATE = "rate"
SEVERAL = "+"  # between policies that are chosen together
PLURAL = {one: many for many, one in SINGULAR.items()}


class Axis(NamedTuple):
    """A thing that is chosen differently: ``scheduler``, ``max_running``, ``scheduler.chunked_prefill_size``, ``rate``;
    and what for, as it was written."""

    name: str
    values: tuple[str, ...]


class Combination(NamedTuple):
    """One choice of each axis that means something beside the others, and what is measured then."""

    choice: dict[str, str]
    job: Job

    @property
    def words(self) -> str:
        """For people: ``scheduler=radix policy=fair-share``."""
        return " ".join(f"{name}={value or 'none'}" for name, value in self.choice.items()) or "as configured"


def axis(text: str) -> Axis:
    """From ``policy=,fair-share,dlpm+early-reject``. Raises ``ConfigError``."""
    name, equals, values = text.partition("=")
    *path, last = name.strip().split(".")
    name = ".".join([*path, last.replace("-", "_")]) if path else name.strip().replace("-", "_")
    head = PLURAL.get(name.partition(".")[0], name.partition(".")[0])
    name = ".".join([head, *name.split(".")[1:]])
    chosen = tuple(value.strip() for value in values.split(","))
    if not equals:
        raise ConfigError(f"matrix {text!r} is no NAME=VALUE,VALUE such as scheduler=unified,radix")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"matrix {text!r} has a value twice")
    if head != RATE and head not in EngineConfig.model_fields:
        raise ConfigError(f"matrix {text!r}: {suggest(head, [*EngineConfig.model_fields, *PLURAL, RATE])}")
    return Axis(name, chosen)


def combinations(
    job: Job, config: EngineConfig, axes: Sequence[Axis], *, fields: Collection[str] = EngineConfig.model_fields
) -> list[Combination]:
    """All there are, each once. An option of a plugin that a combination does not select is no choice there.

    Args:
        job: what is measured, whatever is chosen.
        config: of the engine that it is measured with.
        fields: of ``EngineConfig`` that count.

    Raises:
        ConfigError: a choice is unknown, or bad; an option is nobody's. PluginError: a plugin is unknown or broken.
    """
    names = [one.name for one in axes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"matrix: {twice} is there twice")
    for one in axes:
        if one.name != RATE and (job.kind == "endpoint" or one.name.partition(".")[0] not in fields):
            raise ConfigError(f"matrix: {one.name} cannot be chosen here")
    registry, used = Registry(), set[str]()
    found: dict[tuple[tuple[str, str], ...], Combination] = {}
    for values in itertools.product(*(one.values for one in axes)):
        choice, changed, rate = _chosen(config, dict(zip(names, values, strict=True)), registry)
        used |= set(choice)
        if job.kind == "engine":
            Effective(LoadedConfig(config=changed), registry, fields=fields)
        update: dict[str, Any] = {} if job.kind == "endpoint" else {"config": plain(changed)}
        update |= {} if rate is None else {"rate": rate}
        shown = {SINGULAR.get(name, name): value for name, value in choice.items()}
        found.setdefault(tuple(choice.items()), Combination(shown, job.model_copy(update=update)))
    if nobodys := next((name for name in names if name not in used), None):
        raise ConfigError(f"matrix: no combination has a plugin with the option {nobodys}")
    return list(found.values())


def _chosen(
    config: EngineConfig, choice: dict[str, str], registry: Registry
) -> tuple[dict[str, str], EngineConfig, float | None]:
    """What of a choice means something, the configuration, and a rate."""
    kept, rate = dict(choice), None
    for name, value in sorted(choice.items(), key=lambda item: "." in item[0]):  # plugins before their options
        if name == RATE:
            rate = _positive(value)
        elif "." not in name:
            config = _with(config, name, _selected(config, name, value, registry))
        elif (changed := _with_option(config, name, value, registry)) is not None:
            config = changed
        else:
            del kept[name]
    return kept, config, rate


def _positive(value: str) -> float:
    try:
        rate = float(value)
        if not 0 < rate < float("inf"):
            raise ValueError
    except ValueError as error:
        raise ConfigError(f"matrix: rate {value!r} is no number of requests a second") from error
    return rate


def _selected(config: EngineConfig, name: str, value: str, registry: Registry) -> Any:
    """The new value of a field. Options that were set stay with plugins that know them."""
    if name in ROLE_KEYS:
        before: Selection = getattr(config, name)
        known = registry.select(name, value).cls.Options.model_fields
        options = {key: one for key, one in before.options.items() if value == before.name or key in known}
        return Selection(name=value, options=options)
    if name in SINGULAR:
        several = {one.name: one for one in getattr(config, name)}
        return tuple(several.get(one, Selection(name=one)) for one in value.split(SEVERAL) if one)
    return value


def _with_option(config: EngineConfig, name: str, value: str, registry: Registry) -> EngineConfig | None:
    """With an option of a selected plugin; ``None``: no plugin has it that is selected. ``scheduler.x``, ``policies.x``
    where there is one, ``policies.NAME.x``."""
    role, *path, option = name.split(".")
    many = role in SINGULAR
    picks: tuple[Selection, ...] = getattr(config, role) if many else (getattr(config, role),)
    if not all(isinstance(pick, Selection) for pick in picks):
        raise ConfigError(f"matrix: {role} has no options such as {name}")
    keys = keys_of(role, [pick.name for pick in picks]) if many else [role]
    changed = list(picks)
    for number, (key, pick) in enumerate(zip(keys, picks, strict=True)):
        meant = not path or key == ".".join([role, *path])
        if meant and option in registry.select(SINGULAR.get(role, role), pick.name).cls.Options.model_fields:
            changed[number] = Selection(name=pick.name, options={**pick.options, option: value})
    if tuple(changed) == tuple(picks):
        return None
    return _with(config, role, tuple(changed) if many else changed[0])


def _with(config: EngineConfig, name: str, value: Any) -> EngineConfig:
    try:
        return EngineConfig.model_validate({**{n: getattr(config, n) for n in EngineConfig.model_fields}, name: value})
    except ValueError as error:
        raise ConfigError(f"matrix: {name} {value!r}: {error}") from error
