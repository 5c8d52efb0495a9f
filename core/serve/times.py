"""The course of a request as its client sees it, and what comes of many: histograms, and counts by tenant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.core.histograms import GAPS, SECONDS, Histogram

if TYPE_CHECKING:
    from engine.core.serve.streams import Stream

MAX_TENANTS = 100
OTHERS = "other"  # all tenants beyond those together


@dataclass(slots=True)
class Course:
    """When what happened to one request, in seconds on the client's clock; ``None``: it did not.

    ``waited`` is for how long it waited to begin, on the engine's clock, and ``waited_for`` what it waited for last.
    """

    accepted: float = 0.0
    waited: float | None = None
    waited_for: str = ""
    first: float | None = None
    last: float | None = None
    ended: float | None = None


class Times:
    """Histograms over all requests of one client.

    Attributes:
        first: acceptance to the first token.
        gap: between two tokens of one request; tokens that come together share their gap evenly.
        whole: acceptance to the end, however it ended.
        decode: first token to the end, of those that had one.
        queue: waiting to begin, by what was waited for last.
    """

    def __init__(self) -> None:
        self.first, self.whole, self.decode = (Histogram.of(SECONDS) for _ in range(3))
        self.gap = Histogram.of(GAPS)
        self.queue: dict[str, Histogram] = {}

    def started(self, waited: float, reason: str) -> None:
        """A request began. Mutates."""
        if reason not in self.queue:
            self.queue[reason] = Histogram.of(SECONDS)
        self.queue[reason].add(waited)

    def tokens(self, course: Course, count: int, now: float) -> None:
        """So many tokens of one request came together. The first to come have no gap. Mutates."""
        if course.last is None:
            course.first = now
            self.first.add(now - course.accepted)
        else:
            self.gap.add((now - course.last) / count, count)
        course.last = now

    def ended(self, course: Course) -> None:
        """A request has ended. Mutates."""
        assert course.ended is not None
        self.whole.add(course.ended - course.accepted)
        if course.first is not None:
            self.decode.add(course.ended - course.first)


@dataclass(slots=True)
class Share:
    """What one tenant had: requests accepted and ended by reason, tokens of its prompts and of its answers."""

    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0


class Tenants:
    """Counts by tenant: the first hundred by name, all others as one, so that nobody can make metrics grow. Requests
    without a tenant are not counted here.

    Attribute ``shares``: by name.
    """

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}

    def accepted(self, tenant: str) -> None:
        """A request of this tenant was accepted. Mutates."""
        if tenant:
            self._of(tenant).accepted += 1

    def ended(self, stream: Stream, reason: str) -> None:
        """One has ended. Mutates."""
        if stream.tenant:
            share = self._of(stream.tenant)
            share.ended[reason] += 1
            share.prompt_tokens += stream.num_prompt
            share.output_tokens += stream.num_output

    def _of(self, tenant: str) -> Share:
        if tenant not in self.shares and len(self.shares) >= MAX_TENANTS:
            tenant = OTHERS
        return self.shares.setdefault(tenant, Share())
