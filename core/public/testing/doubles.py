"""Plugins that stand in for others: one that does nothing, and ones that fail on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.hookspecs import hookimpl
from engine.core.plan import EvictionPool, Outcome
from engine.core.protocols import Policy
from engine.core.request import Request


class DoNothing(Policy):
    """Is asked everything that a policy can be, and has no opinion: what a plugin costs and must not change."""

    name = "do-nothing"

    @hookimpl
    def order(self, waiting: Sequence[Request]) -> None:
        """As it stands."""

    @hookimpl
    def admit(self, request: Request) -> None:
        """No objection."""

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> None:
        """Whatever the next one says."""

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """No books."""
