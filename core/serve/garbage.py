"""Garbage collection of a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """What has been loaded by now stays: no collection looks at it. A full one would walk over all of it, for tenths of
    a second, while every row of a batch waits. Mutates the process; at its end all is as it was."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
