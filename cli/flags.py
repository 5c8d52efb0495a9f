"""Configuration on the command line: a flag for every field, and ``--scheduler.option value`` for plugin options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.core.config import MANY_KEYS, EngineConfig, LoadedConfig, load_config

DOTTED = re.compile(r"--([A-Za-z_-]+\.[A-Za-z0-9_.-]+)(?:=(.*))?", re.DOTALL)
SINGULAR = {"policies": "policy", "connectors": "connector"}
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with configuration.", metavar="FILE")]


def split_dotted(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take ``--role.option value`` (or ``=value``, or no value for true) out of the arguments."""
    plain: list[str] = []
    dotted: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*plain, word, *rest], dotted
        match = DOTTED.fullmatch(word)
        if match is None:
            plain.append(word)
            continue
        name, value = match.groups()
        if value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        role, _, option = name.partition(".")
        dotted[f"{role.replace('-', '_')}.{option.replace('-', '_')}"] = value
    return plain, dotted


def with_config(without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each field of ``EngineConfig`` and pass it the ``LoadedConfig`` as ``loaded``.

    The flags are made from the model, so that a new field is a new flag. Precedence: flags, environment, file.
    """
    names = [name for name in EngineConfig.model_fields if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(ctx: typer.Context, config: Path | None = None, **given: Any) -> None:
            flags: dict[str, Any] = {name: given.pop(name) for name in names}
            flags = {name: value for name, value in flags.items() if value is not None and value != []}
            flags.update(ctx.obj or {})
            command(loaded=load_config(file=config, env=os.environ, flags=flags), **given)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "loaded"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("ctx", keyword, annotation=typer.Context),
            *own,
            inspect.Parameter("config", keyword, default=None, annotation=ConfigFile),
            *(inspect.Parameter(name, keyword, default=None, annotation=_annotation(name)) for name in names),
        ]
        wrapper.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in parameters])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
        return wrapper

    return decorate


def _annotation(name: str) -> Any:
    """All values travel as text: one place (the configuration) converts and explains."""
    field = EngineConfig.model_fields[name]
    flag = f"--{SINGULAR.get(name, name).replace('_', '-')}"
    words = f"{field.description}" + (" (repeatable)" if name in MANY_KEYS else "")
    if field.annotation is bool:
        return Annotated[str | None, typer.Option(flag, help=words, metavar="true|false")]
    metavar = "N" if field.annotation in (int, int | None) else SINGULAR[name].upper() if name in SINGULAR else "VALUE"
    kind = list[str] | None if name in MANY_KEYS else str | None
    return Annotated[kind, typer.Option(flag, help=words, metavar=metavar)]


def chosen(loaded: LoadedConfig, description: Mapping[str, Any]) -> list[str]:
    """What was chosen, line by line, for people: plugins with where they come from, pages, limits."""
    limits = description["limits"]
    lines = [f"model      {description['model']['name']}"]
    for plugin in description["plugins"]:
        options = ", ".join(f"{key}={value}" for key, value in plugin["options"].items())
        lines.append(
            f"{plugin['role']:<10} {plugin['name']} ({plugin['distribution']}{': ' + options if options else ''})"
        )
    tokens = limits["num_pages"] * limits["page_size"]
    lines.append(f"KV pages   {limits['num_pages']} x {limits['page_size']} tokens = {tokens} tokens")
    lines.append(f"limits     {limits['max_model_len']} tokens a request, {limits['max_running']} running, "
                 f"{limits['max_waiting']} waiting, {limits['max_batch_tokens']} tokens a step")  # fmt: skip
    for key, origin in loaded.origins.items():
        lines.append(f"set by     {origin}: {key}")
    return lines
