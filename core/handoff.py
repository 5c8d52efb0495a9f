"""The engine's part in a hand-off (``role``): the default of every connector that has an option of that name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from engine.core.config import Selection
from engine.core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from engine.core.registry import Registry

OPTION = "role"
BOTH = "both"


def hands_over(cls: Any) -> bool:
    """Whether a plugin's class moves KV from engine to engine: it can be told which side it is."""
    return OPTION in cls.Options.model_fields


def with_role(selection: Selection, cls: Any, role: str) -> Selection:
    """The selection of a plugin with the engine's role as its own. What is set for the plugin itself stays."""
    if role == BOTH or OPTION in selection.options or not hands_over(cls):
        return selection
    return Selection(name=selection.name, options={**selection.options, OPTION: role})


def check_role(role: str, selected: Iterable[Any], registry: Registry, origin: str = "default") -> None:
    """Raise ``ConfigError`` where an engine shall be one side of a hand-off, and nothing selected hands over.

    Args:
        selected: classes of the selected connectors.
        origin: who said so.
    """
    if role == BOTH or any(hands_over(cls) for cls in selected):
        return
    able = [name for name in registry.names("connector") if _able(registry, name)]
    words = " or ".join(f"--connector {name}" for name in able) or "none is installed"
    raise ConfigError(f"role ({origin}): {role!r} needs a connector that hands KV to another engine: {words}")


def _able(registry: Registry, name: str) -> bool:
    """One that does not work is nobody to recommend."""
    try:
        return hands_over(registry.select("connector", name).cls)
    except PluginError:
        return False
