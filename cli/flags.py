"""Configuration on the command line: a flag for every field, and ``--scheduler.option value`` for plugin options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.core.config import REPEATED, ROLE_KEYS, SINGULAR, EngineConfig, LoadedConfig, load_config
from engine.core.values import hidden, kind_of, readable

DOTTED = re.compile(r"--([A-Za-z_-]+\.[A-Za-z0-9_.:-]+)(?:=(.*))?", re.DOTALL)
METAVARS = {"int": "N", "float": "N", "true or false": "true|false"}
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
        role, *path, option = name.split(".")
        dotted[".".join((role.replace("-", "_"), *path, option.replace("-", "_")))] = value
    return plain, dotted


def with_config(
    without: Collection[str] = (), *, checked: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each field of ``EngineConfig`` and pass it the ``LoadedConfig`` as ``loaded``.

    The flags are made from the model, so that a new field is a new flag. Precedence: flags, environment, file.

    Args:
        without: fields that the command has no use for.
        checked: check the options of all selected plugins first, so that what is wrong is told with its origin.
    """
    names = [name for name in EngineConfig.model_fields if name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(ctx: typer.Context, config: Path | None = None, **given: Any) -> None:
            values = {name: given.pop(name) for name in names}
            loaded = load(config, values, ctx.obj or {})
            if checked:
                from engine.core.effective import Effective

                Effective(loaded, fields=names)
            command(loaded=loaded, **given)

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
        wrapper.engine_fields = names  # type: ignore[attr-defined]  # for the help of the selected plugins
        return wrapper

    return decorate


def load(config: Path | None, values: Mapping[str, Any], dotted: Mapping[str, str]) -> LoadedConfig:
    """The configuration of a command line. Raises ``ConfigError``.

    Args:
        config: the file of ``--config``.
        values: fields as given by flags; ``None`` or nothing where they were not.
        dotted: options of plugins as given by flags.
    """
    flags = {name: value for name, value in values.items() if value is not None and value != []}
    return load_config(file=config, env=os.environ, flags={**flags, **dotted})


def _annotation(name: str) -> Any:
    """All values travel as text: one place (the configuration) converts and explains."""
    field = EngineConfig.model_fields[name]
    flag = f"--{SINGULAR.get(name, name).replace('_', '-')}"
    if name in SINGULAR or name in REPEATED:
        words = f"{field.description} (repeatable)"
        return Annotated[list[str] | None, typer.Option(flag, help=words, metavar=SINGULAR.get(name, "value").upper())]
    default = field.default.name if name in ROLE_KEYS else field.default
    words = f"{field.description}" + ("" if default is None else f" \\[default: {readable(default)}]")
    metavar = "NAME" if name in ROLE_KEYS else METAVARS.get(kind_of(field.annotation).split(" or none")[0], "VALUE")
    return Annotated[str | None, typer.Option(flag, help=words, metavar=metavar)]


def chosen(loaded: LoadedConfig, description: Mapping[str, Any]) -> list[str]:
    """What was chosen, line by line, for people: plugins with where they come from, pages, limits."""
    limits = description["limits"]
    lines = [f"model      {description['model']['name']}"]
    for plugin in description["plugins"]:
        options = ", ".join(f"{key}={hidden(key, value)}" for key, value in plugin["options"].items())
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
