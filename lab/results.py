"""What came of a workload, on simulated engines or on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.lab.driving import Client
from engine.lab.measured import SLO, Timed, summary
from engine.lab.replica import Used


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What came of a workload.

    Attributes:
        requests: each once, in the order in which they ended.
        gaps: times between tokens of all of them, in seconds.
        seconds: from the first arrival to the last end; of a simulation, simulated ones.
        engines: what each did; empty: nobody knows.
        wall, cpu: seconds that the simulation took, or of the client that measured.
        about: what was simulated or measured, as plain values.
        client: how the client did that measured real engines; ``None``: it is a simulation.
    """

    workload: str
    requests: Sequence[Timed]
    gaps: NDArray[np.float32]
    seconds: float
    engines: Sequence[Used]
    wall: float
    cpu: float
    about: dict[str, Any] = field(default_factory=dict)
    client: Client | None = None

    def summary(self, slo: SLO | None = None) -> dict[str, Any]:
        """All requests and engines together, as plain values."""
        own = summary(self.requests, self.gaps, self.seconds, slo or SLO())
        if self.client is not None:
            own["client"] = {**self.client._asdict(), "doubts": self.client.doubts}
        if not self.engines:
            return {**own, "preemptions": None}
        steps = sum(one.steps for one in self.engines)
        lived = self.seconds * len(self.engines)
        rows = [one.rows_a_step * one.steps for one in self.engines if one.rows_a_step is not None]
        return {
            **own,
            "preemptions": sum(one.preemptions for one in self.engines),
            "steps": steps,
            "rows_a_step": None if len(rows) < len(self.engines) else sum(rows) / steps if steps else 0.0,
            "busy_share": sum(one.busy for one in self.engines) / lived if lived else 0.0,
            "recomputed_tokens": sum(one.recomputed_tokens for one in self.engines),
        }

    def plain(self, slo: SLO | None = None, *, each: bool = False) -> dict[str, Any]:
        """All of it as plain values, for JSON. ``each``: every request, too."""
        data: dict[str, Any] = {
            "workload": self.workload, "about": self.about, "summary": self.summary(slo),
            "engines": [one._asdict() for one in self.engines],
            "client" if self.client is not None else "simulation": {"wall_seconds": self.wall, "cpu_seconds": self.cpu},
        }  # fmt: skip
        if each:
            data["curves"] = self.curves()
            data["requests"] = [asdict(one) for one in self.requests]
        return data

    def curves(self) -> dict[str, list[float]]:
        """Each hundredth of what was measured, from the least to the greatest: 101 values each, for plots."""
        named = {name: [getattr(one, name) for one in self.requests] for name in ("queue", "ttft", "tpot", "e2e")}
        values = {name: np.array([one for one in own if one is not None]) for name, own in named.items()}
        values["itl"] = self.gaps.astype(np.float64)
        steps = np.linspace(0, 100, 101)
        return {name: [round(x, 7) for x in np.percentile(own, steps)] for name, own in values.items() if len(own)}
