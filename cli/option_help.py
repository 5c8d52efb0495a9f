"""The options of the selected plugins, below the help of every command that takes the engine's flags."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from typer import BadParameter
from typer.core import TyperCommand

from engine.cli.flags import load
from engine.core.config import flag_of
from engine.core.errors import EngineError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from engine.core.effective import Selected
    from engine.core.registry import Found

ARGUMENTS = "engine.arguments"


class Section(NamedTuple):
    """A selected plugin and its options: flag, type, and what it is for. ``cause``: why there are none to show."""

    title: str
    rows: list[tuple[str, str, str]]
    cause: str = ""


class EngineCommand(TyperCommand):
    """A command whose help ends with the options of the plugins that its command line, the environment and the file
    select. What is wrong with the selection is shown there, too: the help is printed whatever it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments: the help is asked for before any of them is looked at. Options of plugins are refused
        where nobody would read them."""
        if ctx.obj and not hasattr(self.callback, "engine_fields"):
            raise BadParameter(f"'{ctx.info_name}' takes no plugin options such as {flag_of(next(iter(ctx.obj)))}")
        ctx.meta[ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The command's own help, then the plugins'."""
        super().format_help(ctx, formatter)
        fields = getattr(self.callback, "engine_fields", None)
        if fields is None:
            return
        given, _, _ = self.make_parser(ctx).parse_args(args=list(ctx.meta.get(ARGUMENTS, ())))
        values = {name: given.get(name) for name in fields}
        show(list(sections(given.get("config"), values, ctx.obj or {}, fields)))


def sections(
    config: str | None, values: Mapping[str, Any], dotted: Mapping[str, str], fields: Collection[str]
) -> Iterator[Section]:
    """One section a selected plugin; where something cannot be selected, its cause."""
    from engine.core.effective import selected
    from engine.core.registry import Registry

    registry = Registry()
    try:
        loaded = load(Path(config) if config else None, values, dotted)
    except EngineError as error:
        yield Section("Plugins", [], str(error))
        return
    for one in selected(registry, loaded.config, fields):
        title = f"{one.role.capitalize()} {one.selection.name}"
        try:
            found = registry.select(one.role, one.selection.name)
        except EngineError as error:
            yield Section(title, [], str(error))
            continue
        yield Section(title, list(rows(found, one)), _wrong(found, one, loaded.origins))


def _wrong(found: Found, one: Selected, origins: Mapping[str, str]) -> str:
    from engine.core.effective import checked_options

    try:
        checked_options(found, one, origins)
    except EngineError as error:
        return str(error)
    return ""


def rows(found: Found, one: Selected) -> Iterator[tuple[str, str, str]]:
    """Flag, type with bounds, and description with default of each option."""
    from engine.core.values import bounds_of, is_secret, kind_of, readable

    for name, field in found.cls.Options.model_fields.items():
        kind = ", ".join(filter(None, (kind_of(field.annotation), bounds_of(field))))
        default = "required"
        if not field.is_required():
            value = field.get_default(call_default_factory=True)
            default = f"default: {'***' if value is not None and is_secret(name, field) else readable(value)}"
        yield flag_of(f"{one.key}.{name}"), kind, f"{field.description or ''} [{default}]".strip()


def show(found: Sequence[Section]) -> None:
    """Print them as the help of the command itself is printed."""
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else max(80, Console().width))
    for section in found:
        table = Table(box=None, show_header=False, padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(ratio=2, style="yellow")
        table.add_column(ratio=5)
        for row in section.rows:
            table.add_row(*(Text(cell) for cell in row))
        parts: list[RenderableType] = [table] if section.rows else []
        if section.cause:
            parts.append(Text(f"error: {section.cause}", style="red"))
        if not parts:
            parts.append(Text("no options"))
        title = f"Options of the {section.title[0].lower()}{section.title[1:]}" if section.rows else section.title
        console.print(Panel(Group(*parts), title=title, title_align="left", border_style="dim"))
