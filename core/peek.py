"""What a plugin class says of itself, read off its source: nothing is imported, so nothing runs and nothing costs.

A wrong contract version is refused before the plugin's module runs, an alias is found without importing every plugin of
its role, and a missing capability is traced to who would provide it. What the source does not say in plain literals is
unknown, and then the class is asked.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NAMES = ("aliases", "provides", "requires", "requires_api")


@dataclass(frozen=True, slots=True)
class Peek:
    """What is known of a class; ``None`` where the source does not say."""

    aliases: tuple[str, ...] | None = None
    provides: frozenset[str] | None = None
    requires: frozenset[str] | None = None
    requires_api: str | None = None


UNKNOWN = Peek()


def locate(target: str) -> ModuleSpec | None:
    """Where the module of ``pkg.module:Class`` is; ``None`` where it is nowhere. Imports not even its package."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = target.partition(":")[0].split(".")
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def peek(target: str, bases: Iterable[str]) -> Peek:
    """What the source says of the class that ``pkg.module:Class`` names.

    Args:
        target: as in an entry point.
        bases: names of classes whose own values are the defaults, e.g. ``Policy``.
    """
    try:
        spec = locate(target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return UNKNOWN
        tree = ast.parse(Path(spec.origin).read_bytes())
    except Exception:
        return UNKNOWN  # importing it will say what is wrong
    name = target.partition(":")[2]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _read(node, frozenset(bases))
    return UNKNOWN


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if isinstance(loaded, ModuleSpec):
        return loaded
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _read(node: ast.ClassDef, bases: frozenset[str]) -> Peek:
    parents = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
    plain = bool(parents) and set(parents) <= bases and not node.decorator_list
    found: dict[str, Any] = {"aliases": (), "provides": (), "requires": (), "requires_api": None} if plain else {}
    for line in node.body:
        for name, value in _assigned(line):
            if name in NAMES:
                found[name] = _literal(value)
    version = found.get("requires_api")
    return Peek(
        _words(found.get("aliases"), tuple),
        _words(found.get("provides"), frozenset),
        _words(found.get("requires"), frozenset),
        version if isinstance(version, str) else None,
    )


def _assigned(line: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(line, ast.Assign):
        return [(target.id, line.value) for target in line.targets if isinstance(target, ast.Name)]
    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
        return [(line.target.id, line.value)]
    return []


def _literal(value: ast.expr) -> Any:
    """The value of a literal, or of ``frozenset``, ``set`` or ``tuple`` of one; ``None`` for anything else."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.keywords:
        if value.func.id not in ("frozenset", "set", "tuple") or len(value.args) > 1:
            return None
        return _literal(value.args[0]) if value.args else ()
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def _words(value: Any, kind: Any) -> Any:
    known = isinstance(value, tuple | list | set) and all(isinstance(item, str) for item in value)
    return kind(value) if known else None
