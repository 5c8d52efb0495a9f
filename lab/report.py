"""A page of what was measured: tables, and plots drawn by matplotlib, all in one file that asks for no other."""

from __future__ import annotations

import io
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

import numpy as np

from engine.core.errors import ConfigError
from engine.lab.cells import Together, measured_of, over_rounds
from engine.lab.jobs import Job

MISSING = "a report needs matplotlib: pip install 'sixhooks[report]'"
STYLES = ("-", "--", ":", "-.")
MOST_LINES = 40  # in one plot
CURVES = {"ttft": "time to the first token", "itl": "times between tokens", "e2e": "time to the end"}
TABLE = ("rate", "goodput", "kept_share", "requests_per_second", "output_tokens_per_second", "ttft_p50", "ttft_p99",
         "tpot_p50", "itl_p50", "itl_p99", "e2e_p50", "e2e_p99", "queue_p99", "cached_share",
         "preemptions")  # fmt: skip
HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>engine bench</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}dl{display:grid;grid-template-columns:9rem 1fr}
dt{color:#57606a}dd{margin:0;overflow-wrap:anywhere}.wide{overflow-x:auto}.plots{display:flex;margin-top:2rem;flex-wrap:wrap;gap:1rem}
figure{margin:0;flex:1 1 32rem}svg{width:100%;height:auto}.warn{border-left:4px solid #d4a72c;padding-left:.7rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #d8dee4;white-space:nowrap}th{font-weight:600;background:#f6f8fa}td.best{font-weight:700}
td.name,th.name{text-align:left}
</style></head><body>
"""
Cells = Sequence[Mapping[str, Any]]


def need() -> None:
    """Raise ``ConfigError`` where what draws the plots is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(MISSING)


def page(job: Job, cells: Cells) -> str:
    """The page, HTML.

    Args:
        job: one of those that were run.
        cells: finished ones, as ``engine bench`` keeps them.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need()
    together = over_rounds(cells)
    parts = [HEAD, "<h1>engine bench</h1>", _about(job, cells), *_warnings(cells), _table(together)]
    plots = [plot for draw in (_bars, _rates, _curves, _probes) for plot in draw(job, together, cells)]
    figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
    return "".join([*parts, '<div class="plots">', figures, "</div></body></html>\n"])


def _about(job: Job, cells: Cells) -> str:
    what = {"engine": "an engine of ours, in real time",
            "simulated": "simulated: nothing was computed, time is modelled",
            "endpoint": f"a server: {job.endpoint.get('url')}"}[job.kind]  # fmt: skip
    told = {
        "measured": what, "workload": " + ".join(job.workloads), "SLO": job.slo or "none",
        "rounds": str(max((data["round"] for data in cells), default=0)), "seed": str(job.seed),
        "client": f"{platform.machine()}, Python {platform.python_version()}",
    }  # fmt: skip
    if job.rate is not None and not any("rate" in data["choice"] for data in cells):
        told["rate"] = f"{job.rate:g} requests/s"
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in told.items()) + "</dl>"


def _warnings(cells: Cells) -> Iterator[str]:
    for data in cells:
        words = _name(data["choice"])
        if data.get("died"):
            yield f'<p class="warn">{escape(words)}, round {data["round"]}: {escape(data["died"][-400:])}</p>'
        measured = measured_of(data)
        for doubt in (measured or {}).get("summary", {}).get("client", {}).get("doubts", ()):
            yield f'<p class="warn">{escape(words)}, round {data["round"]}: {escape(doubt)}</p>'


def _name(choice: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value or 'none'}" for name, value in choice.items()) or "as configured"


def _table(together: Sequence[Together]) -> str:
    shown = [name for name in TABLE if any(one.median.get(name) is not None for one in together)]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in shown)
    best = max((one.median.get("goodput") or 0.0 for one in together), default=0.0)
    lines = []
    for one in together:
        cells = []
        for name in shown:
            value = one.median.get(name)
            mark = ' class="best"' if name == "goodput" and value == best and len(together) > 1 else ""
            cells.append(f"<td{mark}>{'' if value is None else f'{value:.4g}'}</td>")
        lines.append(f'<tr><td class="name">{escape(_name(one.choice))}</td>{"".join(cells)}</tr>')
    return (
        "<h2>Medians over the rounds</h2><p>Times in seconds; goodput is requests a second within the SLO.</p>"
        f'<div class="wide"><table><tr><th class="name">combination</th>{head}</tr>{"".join(lines)}</table></div>'
    )


def _svg(name: str, title: str, draw: Callable[[Any], None], height: float = 3.6) -> str:
    """A figure as SVG; names within it are its own, so that several stand in one page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Title": title})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(job: Job, together: Sequence[Together], cells: Cells) -> Iterator[str]:
    """What each combination was worth."""
    which = "rate" if any(one.median.get("rate") is not None for one in together) else "goodput"
    shown = [one for one in together if one.median.get(which) is not None]
    if len(shown) < 2 or not (job.slo or which == "rate"):
        return
    words = "highest rate within the SLO" if which == "rate" else "goodput"

    def draw(axes: Any) -> None:
        values = [one.median[which] or 0.0 for one in shown]
        off = [[v - (one.least[which] or 0.0) for v, one in zip(values, shown, strict=True)],
               [(one.most[which] or 0.0) - v for v, one in zip(values, shown, strict=True)]]  # fmt: skip
        places = range(len(shown))
        axes.barh(places, values, xerr=off, color="#2f6fdf", ecolor="#1b1f24", capsize=2)
        axes.set_yticks(places, [_name(one.choice) for one in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("requests/s (bars: medians, lines: least to greatest)")

    yield _svg("bars", f"{words.capitalize()} ({job.slo})", draw, max(2.2, 0.3 * len(shown) + 1.2))


def _rates(job: Job, together: Sequence[Together], cells: Cells) -> Iterator[str]:
    """What a rate does, where several were run."""
    lines: dict[str, list[tuple[float, Together]]] = {}
    for one in together:
        if "rate" in one.choice and one.rounds:
            rest = _name({name: value for name, value in one.choice.items() if name != "rate"})
            lines.setdefault(rest, []).append((float(one.choice["rate"]), one))
    if max(map(len, lines.values()), default=0) < 2:
        return
    figures = ("ttft_p50", "ttft_p99", "itl_p99", *(("kept_share", "goodput") if job.slo else ()))
    for figure in figures:

        def draw(axes: Any, figure: str = figure) -> None:
            for number, (name, own) in enumerate(lines.items()):
                points = sorted((rate, one.median[figure]) for rate, one in own if one.median[figure] is not None)
                axes.plot(*zip(*points, strict=True), marker="o", label=name, **_style(number))
            axes.set_xlabel("requests/s")
            axes.set_ylim(bottom=0)
            _legend(axes, len(lines))

        yield _svg(f"rate-{figure}", figure.replace("_", " "), draw)


def _curves(job: Job, together: Sequence[Together], cells: Cells) -> Iterator[str]:
    """How times are spread: the share of all that were at most so long."""
    for name, words in CURVES.items():
        lines: list[tuple[str, Any]] = []
        for one in together:
            own = [measured_of(data) for data in cells if data["choice"] == one.choice and not data.get("died")]
            rounds = [data["curves"][name] for data in own if data is not None and name in data.get("curves", {})]
            if rounds:
                lines.append((_name(one.choice), np.median(np.array(rounds), axis=0)))
        if not lines:
            continue

        def draw(axes: Any, lines: list[tuple[str, Any]] = lines, name: str = name) -> None:
            for number, (label, values) in enumerate(lines[:MOST_LINES]):
                axes.plot(np.maximum(values, 1e-6), np.linspace(0, 1, 101), label=label, **_style(number))
            for part in job.slo.split(","):
                if part.startswith(f"{name}="):
                    axes.axvline(float(part.partition("=")[2]), color="#cf222e", linewidth=1, linestyle=":")
            axes.set_xscale("log")
            axes.set_xlabel(f"seconds ({name})")
            axes.set_ylabel("share at most")
            _legend(axes, len(lines))

        yield _svg(f"curve-{name}", words.capitalize(), draw)


def _probes(job: Job, together: Sequence[Together], cells: Cells) -> Iterator[str]:
    """The searches."""
    found = [(data, data["found"]["probes"]) for data in cells if "found" in data]
    if not found or job.search is None:
        return
    share = float(job.search.get("share", 0.9))

    def draw(axes: Any) -> None:
        for number, (data, probes) in enumerate(found[:MOST_LINES]):
            points = sorted((probe["rate"], probe["share"]) for probe in probes)
            axes.plot(*zip(*points, strict=True), marker="o", label=_name(data["choice"]), **_style(number))
        axes.axhline(share, color="#cf222e", linewidth=1, linestyle=":")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("share within the SLO")
        _legend(axes, len(found))

    yield _svg("probes", f"Searches for {share:.0%} within {job.slo}", draw)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": f"C{number % 10}",
        "linestyle": STYLES[number // 10 % len(STYLES)],
        "linewidth": 1.4,
        "markersize": 3,
    }


def _legend(axes: Any, lines: int) -> None:
    if lines > 1:
        axes.legend(fontsize=6 if lines > 6 else 7, frameon=False)
