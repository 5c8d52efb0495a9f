"""The cache's tree as a picture: each node is a line from where its tokens begin to where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.plugins.frontends._dashboard_charts import BASE, CACHED, DECODE, FAINT, QUIET, TOOLTIP, Options
from engine.plugins.frontends._dashboard_frame import Frame

THIN, THICK = 3.0, 8.0


class Placed(NamedTuple):
    """A node in the picture: from token ``left`` to ``right``, at height ``y``; its parent's ``y``."""

    left: int
    right: int
    y: float
    parent_y: float


def placed(nodes: Sequence[Sequence[int]]) -> list[Placed]:
    """Where each node of an outline stands: leaves below each other, a parent in the middle of its children."""
    below: list[list[int]] = [[] for _ in nodes]
    top: list[int] = []
    ends: list[tuple[int, int]] = []
    for place, (parent, tokens, *_) in enumerate(nodes):
        (top if parent < 0 else below[parent]).append(place)
        left = 0 if parent < 0 else ends[parent][1]
        ends.append((left, left + tokens))
    heights = [0.0] * len(nodes)
    order: list[int] = []
    stack = top[::-1]
    while stack:  # parents before what is below them, branch by branch
        place = stack.pop()
        order.append(place)
        stack += below[place][::-1]
    leaves = 0
    for place in order:
        if not below[place]:
            heights[place], leaves = float(leaves), leaves + 1
    for place in reversed(order):
        if below[place]:
            heights[place] = sum(heights[child] for child in below[place]) / len(below[place])
    middle = sum(heights[place] for place in top) / len(top) if top else 0.0
    return [
        Placed(*ends[place], heights[place], middle if node[0] < 0 else heights[node[0]])
        for place, node in enumerate(nodes)
    ]


def tree(frame: Frame) -> Options:
    """The newest part of the cache's tree, along the tokens of prompts."""
    nodes = frame.look.get("tree") or ()
    forks: list[Options] = []
    stretches: list[Options] = []
    places = placed(nodes)
    for (_, tokens, pages, users, children, _used), at in zip(nodes, places, strict=True):
        colour = DECODE if users else CACHED
        if at.y != at.parent_y:
            forks.append({"coords": [[at.left, at.parent_y], [at.left, at.y]],
                          "lineStyle": {"color": DECODE if users else FAINT, "width": 1.2}})  # fmt: skip
        stretches.append({
            "name": f"tokens {at.left} to {at.right}: {tokens} in {pages} pages; {users} requests use it now; "
                    f"{children} branches follow",
            "coords": [[at.left, at.y], [at.right, at.y]],
            "lineStyle": {"color": colour, "width": min(THICK, THIN + users), "opacity": 1 if users else 0.75},
        })  # fmt: skip
    high = max((at.y for at in places), default=0.0)
    longest = max((at.right for at in places), default=1)
    line = {"type": "lines", "coordinateSystem": "cartesian2d", "polyline": True, "progressive": 0}
    return {
        **BASE,
        "grid": {"left": 8, "right": 14, "top": 6, "bottom": 22},
        "tooltip": {**TOOLTIP, "trigger": "item", "formatter": "{b}"},
        "xAxis": {"type": "value", "min": 0, "max": longest,
                  "axisLabel": {"color": QUIET, "fontSize": 10, "hideOverlap": True},
                  "splitLine": {"lineStyle": {"color": FAINT}}, "axisLine": {"lineStyle": {"color": FAINT}}},
        "yAxis": {"type": "value", "show": False, "inverse": True, "min": -0.6, "max": high + 0.6},
        "series": [{**line, "data": forks, "silent": True}, {**line, "data": stretches}],
    }  # fmt: skip
