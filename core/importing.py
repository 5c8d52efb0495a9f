"""Importing a plugin: timed, and undone where it fails half-way, so that nothing half registered stays behind."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OURS = "engine"


def load(target: str) -> tuple[Any, float]:
    """What ``pkg.module:Class`` names, and the seconds that importing its module took (0 if it was there).

    Raises whatever importing raises, ``SystemExit`` included.
    """
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(f"{target!r} names no class: pkg.module:Class is wanted")
    start = time.perf_counter()
    known = module in sys.modules
    with undone(module):
        value: Any = importlib.import_module(module)
    seconds = 0.0 if known else time.perf_counter() - start
    for part in attribute.split("."):
        value = getattr(value, part)
    return value, seconds


@contextmanager
def undone(module: str) -> Iterator[None]:
    """Undo what a failing import did to the interpreter: modules of its own package, and entries of the import path.

    Modules of others stay: extension modules cannot be loaded twice. So do ours, whose classes are in use elsewhere.
    """
    before, path, finders = set(sys.modules), list(sys.path), list(sys.meta_path)
    try:
        yield
    except BaseException:
        own = module.partition(".")[0]
        for name in [] if own == OURS else sorted(set(sys.modules) - before):
            if name.partition(".")[0] == own:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in before and parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
        sys.path[:], sys.meta_path[:] = path, finders
        raise
