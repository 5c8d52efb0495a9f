"""The ``engine`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``engine`` command."""
    from engine.cli.app import run

    run(sys.argv[1:])
