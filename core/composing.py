"""Connectors that drive others: what a composing connector takes over, the core knows no more."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import ConfigError
from engine.core.protocols import Connector


def composed(connectors: Sequence[Connector]) -> list[Connector]:
    """Those that the core drives itself. Raises ``ConfigError`` where two connectors want to drive the same one."""
    owners: dict[Connector, Connector] = {}
    for one in connectors:
        for other in one.compose([other for other in connectors if other is not one]):
            if other in owners:
                raise ConfigError(
                    f"connector {other.name!r} is part of two others, of name {one.name!r}: once is enough"
                )
            owners[other] = one
    for other, one in owners.items():
        if one in owners:
            raise ConfigError(f"connector {one.name!r} drives {other.name!r} and is itself driven by another")
    return [one for one in connectors if one not in owners]
