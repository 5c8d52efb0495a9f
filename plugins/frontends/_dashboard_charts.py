"""Frames as options of ECharts. Colours of text and ground are the page's own, so that one picture is for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from engine.core.lens.pages import STATES
from engine.core.lens.steps import LANES, STEPS, Kind
from engine.plugins.frontends._dashboard_frame import Frame

Options = dict[str, Any]

DECODE, PREFILL, HIT, AGAIN, LOST = "#2dd4bf", "#6366f1", "#a78bfa", "#f97316", "#ef4444"
CACHED, SHARED, FREE = "#84cc16", "#eab308", "rgba(140,152,176,.18)"
EDGE = "rgba(10,15,29,.4)"
FAINT, QUIET = "rgba(140,152,176,.16)", "#8591a8"

KINDS: dict[Kind, tuple[str, str]] = {
    Kind.DECODE: ("decode", DECODE),
    Kind.PREFILL: ("prefill", PREFILL),
    Kind.HIT: ("prefill after a cached prefix", HIT),
    Kind.AGAIN: ("computed again", AGAIN),
    Kind.PREEMPTED: ("preempted", LOST),
}
PAGES = dict(zip(STATES, (FREE, CACHED, PREFILL, DECODE, SHARED), strict=True))
TOOLTIP: Options = {
    "confine": True, "backgroundColor": "var(--card)", "borderColor": "var(--line)", "padding": [6, 10],
    "textStyle": {"color": "var(--ink)", "fontSize": 12},
    "extraCssText": "box-shadow:0 8px 30px rgb(0 0 0/.25);border-radius:8px",
}  # fmt: skip
BASE: Options = {"animation": False, "textStyle": {"fontFamily": "inherit"}}
LEFT, RIGHT = 46, 46


def steps(frame: Frame) -> Options:
    """Tokens of each of the newest steps by what they were, and how long it took."""
    seen = _padded(frame)

    def bars(name: str, colour: str, values: Sequence[Any], **more: Any) -> Options:
        return {"name": name, "type": "bar", "stack": "tokens", "data": list(values), "itemStyle": {"color": colour},
                "barCategoryGap": "18%", "large": False, **more}  # fmt: skip

    return {
        **BASE,
        "grid": {"left": LEFT, "right": RIGHT, "top": 30, "bottom": 6},
        "legend": _legend(),
        "tooltip": {**TOOLTIP, "trigger": "axis", "axisPointer": {"type": "shadow"}},
        "xAxis": {"type": "category", "data": [_name(one) for one in seen], "axisLabel": {"show": False},
                  "axisTick": {"show": False}, "axisLine": {"lineStyle": {"color": FAINT}}},
        "yAxis": [_axis(), _axis(splitLine={"show": False}, position="right")],
        "series": [
            bars("decode", DECODE, [one and one.decode for one in seen]),
            bars("prefill", PREFILL, [one and one.prefill for one in seen]),
            bars("computed again", AGAIN, [one and one.again for one in seen]),
            bars("found in the cache", CACHED, [one and one.found for one in seen],
                 itemStyle={"color": CACHED, "opacity": 0.45}),
            {"name": "step, ms", "type": "line", "yAxisIndex": 1, "symbol": "none", "connectNulls": False,
             "data": [one and round(one.seconds * 1e3, 2) for one in seen],
             "lineStyle": {"width": 1.2, "color": QUIET}, "itemStyle": {"color": QUIET}, "z": 5},
        ],
    }  # fmt: skip


def lanes(frame: Frame) -> Options:
    """Who computed in which step: a row for each request that is followed, a column for each step."""
    seen = _padded(frame)
    cells: dict[int, list[list[Any]]] = {kind: [] for kind in KINDS}
    for place, one in enumerate(seen):
        for lane, number, kind, tokens, found, why in one.cells if one is not None else ():
            cell = [place, lane, tokens, frame.names.get(number, (f"#{number}", "", 0))[0]]
            cells[kind].append([*cell, found, why] if kind != Kind.DECODE else cell)
    most = max((one.decode + one.prefill + one.again for one in seen if one is not None), default=1)
    series, maps = [], []
    for index, (kind, (words, colour)) in enumerate(KINDS.items()):
        shown = [0, 3, 2] if kind == Kind.DECODE else [0, 3, 2, 4, 5]
        names = ["step", "slot", "tokens lost" if kind == Kind.PREEMPTED else "tokens", "request", "cached", "cut by"]
        series.append({"name": words, "type": "heatmap", "data": cells[kind], "dimensions": names[: max(shown) + 1],
                       "encode": {"x": 0, "y": 1, "value": 2, "tooltip": shown}, "progressive": 0,
                       "itemStyle": {"borderWidth": 1, "borderColor": EDGE}})  # fmt: skip
        faint = {Kind.DECODE: 1.0, Kind.PREEMPTED: 1.0}.get(kind, 0.55)
        maps.append({"show": False, "seriesIndex": index, "dimension": 2, "min": 1, "max": max(2, most), "inRange":
                     {"color": [colour, colour], "opacity": [faint, 1.0]}})  # fmt: skip
    return {
        **BASE,
        "grid": {"left": LEFT, "right": RIGHT, "top": 4, "bottom": 24},
        "tooltip": {**TOOLTIP, "trigger": "item"},
        "xAxis": {"type": "category", "data": [_name(one) for one in seen], "axisTick": {"show": False},
                  "axisLine": {"lineStyle": {"color": FAINT}}, "axisLabel": {"color": QUIET, "fontSize": 10}},
        "yAxis": {"type": "category", "data": list(range(LANES)), "inverse": True, "axisLabel": {"show": False},
                  "axisTick": {"show": False}, "axisLine": {"show": False},
                  "splitArea": {"show": True, "areaStyle": {"color": ["transparent", "rgba(140,152,176,.05)"]}}},
        "visualMap": maps,
        "series": series,
    }  # fmt: skip


def pages(frame: Frame) -> Options:
    """The pool, a cell for each stretch of pages, by the state that most of them are in."""
    found = frame.look.get("pages")
    states = found["cells"] if found else [[] for _ in STATES]
    each, total = (found["pages"], found["total"]) if found else (1, 0)
    count = len(states[0])
    wide = max(8, ceil((count * 3.2) ** 0.5)) if count else 8
    data: list[list[int]] = []
    for place in range(count):
        counts = [state[place] for state in states]
        state = max(range(len(counts)), key=lambda one: (counts[one], one))
        first = place * each
        data.append([place % wide, place // wide, state, first, min(total, first + each) - 1, *counts])
    names = ["x", "y", "state", "first page", "last page", *STATES]
    return {
        **BASE,
        "grid": {"left": 4, "right": 4, "top": 4, "bottom": 34},
        "tooltip": {**TOOLTIP, "trigger": "item"},
        "xAxis": {"type": "category", "show": False, "data": list(range(wide))},
        "yAxis": {"type": "category", "show": False, "inverse": True, "data": list(range(max(1, ceil(count / wide))))},
        "visualMap": {"type": "piecewise", "dimension": 2, "orient": "horizontal", "left": "center", "bottom": 0,
                      "itemSymbol": "roundRect", "itemWidth": 12, "itemHeight": 12, "itemGap": 14,
                      "textStyle": {"color": QUIET}, "hoverLink": False,
                      "pieces": [{"value": place, "label": name, "color": PAGES[name]}
                                 for place, name in enumerate(STATES)]},
        "series": [{"name": "pages" if each > 1 else "page", "type": "heatmap", "data": data, "dimensions": names,
                    "encode": {"x": 0, "y": 1, "value": 2, "tooltip": [3, 4, 5, 6, 7, 8, 9] if each > 1 else [3]},
                    "progressive": 0, "itemStyle": {"borderWidth": 1, "borderColor": EDGE}}],
    }  # fmt: skip


def _legend() -> Options:
    return {"top": 0, "left": LEFT - 8, "itemWidth": 11, "itemHeight": 11, "itemGap": 16, "icon": "roundRect",
            "textStyle": {"color": QUIET, "fontSize": 12}}  # fmt: skip


def pace(frame: Frame) -> Options:
    """Tokens a second and the hit rate over the last minutes."""
    courses: Mapping[str, Sequence[float]] = frame.courses
    computed, generated, hits = (courses.get(name, ()) for name in ("computed", "generated", "hits"))

    def line(name: str, values: Sequence[float], colour: str, **more: Any) -> Options:
        return {"name": name, "type": "line", "symbol": "none", "smooth": 0.25, "itemStyle": {"color": colour},
                "lineStyle": {"width": 2, "color": colour}, "data": [round(value, 3) for value in values],
                **more}  # fmt: skip

    return {
        **BASE,
        "grid": {"left": LEFT, "right": RIGHT, "top": 30, "bottom": 8},
        "legend": _legend(),
        "tooltip": {**TOOLTIP, "trigger": "axis"},
        "xAxis": {"type": "category", "boundaryGap": False, "axisLabel": {"show": False}, "axisTick": {"show": False},
                  "axisLine": {"lineStyle": {"color": FAINT}},
                  "data": [f"{len(computed) - place - 1} looks ago" for place in range(len(computed))]},
        "yAxis": [_axis(), _axis(splitLine={"show": False}, position="right", min=0, max=100, interval=50)],
        "series": [
            line("computed", computed, PREFILL, areaStyle={"color": PREFILL, "opacity": 0.15}),
            line("generated", generated, DECODE, areaStyle={"color": DECODE, "opacity": 0.15}),
            line("hit rate, %", [100 * share for share in hits], CACHED, yAxisIndex=1,
                 lineStyle={"width": 1.6, "type": "dashed", "color": CACHED}),
        ],
    }  # fmt: skip


def _axis(**more: Any) -> Options:
    return {"type": "value", "axisLabel": {"color": QUIET, "fontSize": 10}, "splitNumber": 3,
            "splitLine": {"lineStyle": {"color": FAINT}}, "axisLine": {"show": False}, **more}  # fmt: skip


def _padded(frame: Frame) -> list[Any]:
    """The newest steps, at the right; ``None`` where there are fewer."""
    return [*[None] * (STEPS - len(frame.steps)), *frame.steps]


def _name(one: Any) -> str:
    return "" if one is None else str(one.step)
