"""Schedulers: who is computed in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from engine.core.plan import Plan
from engine.core.protocols.plugin import Plugin
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.step import Step


class Scheduler(Plugin, ABC):
    """Answers ``plan``, by default also ``order``, ``admit`` and ``evict`` of kind ``running``. No KV arithmetic."""

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """The ``plan`` hook (decorate the implementation with ``hookimpl``)."""

    def queue_key(self) -> Callable[[Request], Any] | None:
        """The key by which the waiting queue is kept sorted at all times; ``None``: by arrival, victims as pushed.

        Asked once, after ``start``. For orders that do not change while a request waits; others answer ``order``.
        """
        return None

    def displace(self, waiting: Iterable[Request], priority: int) -> Request | None:
        """The queue is full: which request is to be aborted for a newcomer of this priority; ``None``: refuse it."""
        return None

    def stats(self) -> Mapping[str, int | float]:
        """Numbers of its own, for whoever watches: ``EngineCore.stats`` names them ``scheduler_…``. None by default."""
        return {}

    def on_idle(self) -> None:
        """Nothing is left to do: the next request comes to an empty engine."""

    def on_preempt(self, request: Request) -> None:
        """The request gave up its pages and is about to be queued again; forget it among those that run."""

    def on_end(self, request: Request) -> None:
        """The request ended outside a commit (aborted, failed, rejected); forget it. Idempotent."""
