"""What ``engine top`` shows, from two looks at a server's metrics."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.cli._http import Server

SAMPLE = re.compile(r"([a-z_:]+)(?:\{(.*)\})? (\S+)")
COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "stopped": "red"}
BAR = 40


@dataclass(frozen=True)
class Sample:
    """One look.

    Attributes:
        at: when, in seconds.
        about: what ``/v1/engine`` says.
        values: metrics by name and labels, as they stand in the exposition.
    """

    at: float
    about: Mapping[str, Any]
    values: Mapping[str, float]

    @classmethod
    def of(cls, server: Server) -> Sample:
        """Look at a server. Raises as ``Server.ask``."""
        about = server.ask("/v1/engine")
        return cls(time.monotonic(), about, parsed(server.text("/metrics")))

    def get(self, name: str) -> float:
        """A metric without labels; 0 where there is none (the engine is gone)."""
        return self.values.get(name, 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """A family by the value of one label, summed over the others."""
        found: dict[str, float] = {}
        for key, value in self.values.items():
            if key.startswith(name + "{") and (match := re.search(rf'\b{label}="([^"]*)"', key)):
                found[match[1]] = found.get(match[1], 0.0) + value
        return found


def parsed(text: str) -> dict[str, float]:
    """Samples of an exposition."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#") and (match := SAMPLE.fullmatch(line)):
            name, labels, value = match.groups()
            found[name if labels is None else f"{name}{{{labels}}}"] = float(value)
    return found


def frame(url: str, before: Sample, now: Sample) -> RenderableType:
    """The whole view."""
    about, seconds = now.about, max(now.at - before.at, 1e-9)
    state = about["state"]
    title = Text.assemble(
        ("engine top ", "bold"), f"{about['model']} at {url} ", (state, f"bold {COLOURS.get(state, 'white')}")
    )
    parts: list[RenderableType] = []
    if about["health"]["cause"]:
        parts.append(Text(about["health"]["cause"], style="red"))
    parts += [_load(now), _pages(now), _pace(before, now, seconds), _queue(now), _ends(before, now, seconds)]
    if tenants := _tenants(now):
        parts.append(tenants)
    return Panel(Group(*parts), title=title, title_align="left")


def trouble(url: str, words: str) -> RenderableType:
    """The view where there is nothing to see."""
    return Panel(Text(words, style="red"), title=f"engine top {url}", title_align="left")


def _load(now: Sample) -> Table:
    table = _rows()
    table.add_row("running", f"{now.get('engine_requests_running'):.0f} requests")
    waiting, tokens = now.get("engine_requests_waiting"), now.get("engine_waiting_tokens")
    parked = now.get("engine_requests_parked")
    table.add_row("waiting", f"{waiting:.0f} requests, {tokens:.0f} prompt tokens; {parked:.0f} not ready")
    return table


def _pages(now: Sample) -> Table:
    total = now.get("engine_kv_pages") or 1.0
    used, cached = now.get("engine_kv_pages_pinned"), now.get("engine_kv_pages_evictable")
    table = _rows()
    table.add_row("pages", Bar(total, 0, used, width=BAR))
    table.add_row("", f"{used:.0f} in use, {cached:.0f} cached, {now.get('engine_kv_pages_free'):.0f} free "
                      f"of {total:.0f} x {now.about['page_size']} tokens")  # fmt: skip
    return table


def _pace(before: Sample, now: Sample, seconds: float) -> Table:
    def rate(name: str) -> float:
        return max(0.0, now.get(name) - before.get(name)) / seconds

    asked, hit = now.get("engine_looked_up_tokens_total"), now.get("engine_cached_tokens_total")
    table = _rows()
    table.add_row("hit rate", f"{hit / asked:.1%} of {asked:.0f} tokens" if asked else "nothing was looked up yet")
    table.add_row("tokens/s", f"{rate('engine_output_tokens_total'):.1f} generated, "
                              f"{rate('engine_computed_tokens_total'):.1f} computed")  # fmt: skip
    table.add_row("steps/s", f"{rate('engine_steps_total'):.1f}, {rate('engine_preemptions_total'):.1f} preemptions/s")
    for words, name in (("TTFT", "engine_time_to_first_token_seconds"), ("ITL", "engine_inter_token_seconds"),
                        ("step", "engine_step_seconds")):  # fmt: skip
        found = [quantile(now, name, share) for share in (0.5, 0.99)]
        if all(one is not None for one in found):
            table.add_row(words, f"p50 at most {found[0]:g} s, p99 at most {found[1]:g} s")
    return table


def quantile(now: Sample, name: str, share: float) -> float | None:
    """The smallest bound that so large a share does not exceed; ``None`` where nothing was observed."""
    buckets = sorted((float(bound), count) for bound, count in now.by(f"{name}_bucket", "le").items())
    if not buckets or not buckets[-1][1]:
        return None
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def _queue(now: Sample) -> Table:
    reasons = {reason: n for reason, n in now.by("engine_requests_waiting_for", "reason").items() if n}
    table = _rows()
    for number, (reason, count) in enumerate(sorted(reasons.items(), key=lambda item: -item[1])):
        table.add_row("" if number else "waits for", f"{reason} {count:.0f}")
    return table


def _ends(before: Sample, now: Sample, seconds: float) -> Table:
    ended = now.by("engine_requests_ended_total", "reason")
    accepted = now.get("engine_requests_accepted_total")
    pace = (accepted - before.get("engine_requests_accepted_total")) / seconds
    table = _rows()
    table.add_row("requests", f"{accepted:.0f} accepted, {pace:.1f} a second")
    table.add_row("ended", ", ".join(f"{reason} {count:.0f}" for reason, count in ended.items() if count) or "none yet")
    return table


def _tenants(now: Sample) -> Table | None:
    accepted = now.by("engine_tenant_requests_accepted_total", "tenant")
    if not accepted:
        return None
    output = now.by("engine_tenant_output_tokens_total", "tenant")
    table = Table("tenant", "accepted", "tokens", box=None)
    for tenant, count in sorted(accepted.items(), key=lambda item: -item[1])[:10]:
        table.add_row(tenant, f"{count:.0f}", f"{output.get(tenant, 0):.0f}")
    return table


def _rows() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=10, style="bold")
    table.add_column()
    return table
