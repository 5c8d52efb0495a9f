"""What a replay found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class NotReplayable(Exception):
    """The trace is not one of ours to decide (yet): another format, or a mode that is not built."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step that differs: what was recorded and what was decided now, field by field."""

    step: int
    recorded: Mapping[str, Any]
    decided: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Side by side, the fields that differ marked."""
        rows = [f"step {self.step}"]
        for name, recorded in self.recorded.items():
            decided = self.decided[name]
            if recorded == decided:
                rows.append(f"    {name:<14} {recorded!r:.160}")
            else:
                rows.append(f"  ! {name:<14} recorded {recorded!r}")
                rows.append(f"  ! {'':<14} decided  {decided!r}")
        return rows


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one trace: how many steps were equal, and where it parted."""

    name: str
    steps: int
    divergence: Divergence | None = None
    unsupported: str | None = None

    @property
    def equal(self) -> bool:
        """Every step is the same."""
        return self.divergence is None and self.unsupported is None
