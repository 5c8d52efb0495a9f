"""``engine plugins show NAME``: all there is to know of a plugin before selecting it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from engine.core.errors import PluginError, suggest
from engine.core.values import bounds_of, kind_of

if TYPE_CHECKING:
    from engine.core.registry import Found, Registry


def show(
    name: Annotated[str, typer.Argument(help="Name, alias, or pkg.module:Class.")],
    role: Annotated[
        str | None, typer.Option("--role", help="Of the plugins of this name, only the one of a role.")
    ] = None,
) -> None:
    """Show a plugin: role, distribution, options, capabilities, contract version, hooks."""
    from engine.core.registry import Registry

    for number, found in enumerate(find(name, role, Registry())):
        typer.echo(("\n" if number else "") + "\n".join(describe(found)))


def find(name: str, role: str | None, registry: Registry) -> list[Found]:
    """Every plugin of that name. Raises ``PluginError`` where there is none, or it does not work."""
    from engine.core.protocols import ROLES

    if role is not None and role not in ROLES:
        raise PluginError(f"unknown role {role!r}: {suggest(role, ROLES)}")
    if ":" in name:
        return [registry.select(role or role_of(name), name)]
    named = [(its, own) for its, own in registry.named(name) if role in (None, its)]
    if not named and (others := registry.named(name)):
        roles = " and ".join(f"a {its}" for its, _ in others)
        raise PluginError(f"no {role} is named {name!r}: it is {roles}")
    if not named:
        raise PluginError(f"no plugin is named {name!r}: {suggest(name, {own for _, own, _ in registry.owners()})}")
    return [registry.select(its, own) for its, own in named]


def role_of(target: str) -> str:
    """The role that ``pkg.module:Class`` plays; ``policy`` where it cannot be told: selecting it says what is wrong."""
    import importlib

    from engine.core.protocols import ROLES

    module, _, name = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), name, None)
    except Exception:
        return "policy"
    return next((role for role, base in ROLES.items() if isinstance(value, type) and issubclass(value, base)), "policy")


def describe(found: Found) -> list[str]:
    """What ``show`` prints, line by line."""
    cls = found.cls
    names = " = ".join((cls.name, *cls.aliases))
    lines = [
        f"{found.role} {names}",
        f"  {(cls.__doc__ or 'no description').strip().splitlines()[0]}",
        f"from      {f'{found.distribution} {found.version}'.strip()} ({cls.__module__}:{cls.__qualname__})",
        f"contract  {cls.requires_api}",
        f"provides  {', '.join(sorted(cls.provides)) or 'nothing'}",
        f"requires  {', '.join(sorted(cls.requires)) or 'nothing'}",
        f"hooks     {', '.join(hooks_of(cls)) or 'none'}",
        "options" if cls.Options.model_fields else "options   none",
    ]
    for name, field in cls.Options.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        kind = ", ".join(filter(None, (kind_of(field.annotation), bounds_of(field))))
        lines.append(f"  {name} ({kind}; {default}): {field.description or ''}".rstrip())
    return lines


def hooks_of(cls: type) -> list[str]:
    """Names of the hooks that the class answers, in the order of a step."""
    from engine.core.hooks import HOOKS

    return [hook for hook in HOOKS if hasattr(inspect.getattr_static(cls, hook, None), "engine_impl")]
