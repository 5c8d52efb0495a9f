"""A line of ``engine doctor``."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """``ok``, ``missing`` (a server would not start), or ``absent`` (optional)."""

    status: str
    name: str
    words: str
