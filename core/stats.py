"""Counters of an engine core. Gauges are read from live state when asked, so they cannot go stale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from engine.core.request import Finish


@dataclass(slots=True)
class Counters:
    """Totals since the start. They only grow."""

    steps: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    late_results: int = 0
    stray_events: int = 0
    failed_steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {f"finished_{reason.value}": 0 for reason in Finish})

    def ended(self, reason: Finish) -> None:
        """Count one request under its terminal reason."""
        self.finished[f"finished_{reason.value}"] += 1

    def flat(self) -> dict[str, int | float]:
        """All counters in one level."""
        values = asdict(self)
        return {**values.pop("finished"), **values}
