"""The dashboard's words and figures as HTML. All that comes from a client is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from engine.plugins.frontends._dashboard_charts import AGAIN, CACHED, DECODE, HIT, KINDS, PREFILL, QUIET, SHARED
from engine.plugins.frontends._dashboard_frame import Frame

WHY_COLOURS = {
    "pages": "#ef4444", "reserve": "#fb7185", "token_budget": PREFILL, "prefill_budget": HIT, "run_slots": SHARED,
    "chunk": "#38bdf8", "behind": QUIET, "not_asked": "#a3adc2", "policy": "#d946ef", "order": "#c084fc",
    "parked": CACHED, "prefix": DECODE, "preemption": AGAIN,
}  # fmt: skip
WARN = {"starting", "draining"}
SHOWN = ("scheduler", "kvcache", "executor", "attention", "connector", "policy")


def brand(name: str) -> str:
    """The mark, and the model's name."""
    bars = "".join(f'<b style="height:{height}px"></b>' for height in (5, 9, 14))
    return f'<div class="brand"><i>{bars}</i>Sixhooks <span>{escape(name)}</span></div>'


def state(frame: Frame) -> str:
    """Where the server is in its life."""
    words = str(frame.life["status"] if frame.life["status"] != "ok" else frame.life["state"])
    kind = "" if frame.life["ready"] else "warn" if frame.life["state"] in WARN else "bad"
    return f'<span class="state {kind}">{escape(words)}</span>'


def cause(frame: Frame) -> str:
    """What keeps it from being ready."""
    return escape(str(frame.life["cause"] or ""))


def chips(about: Mapping[str, Any]) -> str:
    """What was chosen, plugin by plugin, and how steps follow each other."""
    found = [_chip(str(one["name"]), str(one["role"])) for one in about.get("plugins", ()) if one["role"] in SHOWN]
    return "".join([*found, _chip(str(about.get("loop", "")), "loop")])


def tiles(frame: Frame) -> str:
    """The figures at the top."""
    total = frame.value("pages_total") or 1
    used = frame.value("pages_pinned") / total
    asked, found = frame.value("looked_up_tokens"), frame.value("cached_tokens")
    ttft, itl = frame.times.get("ttft"), frame.times.get("itl")
    waiting = frame.value("waiting")
    return "".join((
        _tile("running", f"{frame.value('running'):.0f}", "requests", frame.courses.get("running"), DECODE),
        _tile("waiting", f"{waiting:.0f}", _parked(frame), frame.courses.get("waiting"), SHARED),
        _tile("generated", _short(frame.last("generated")), "tokens/s", frame.courses.get("generated"), DECODE),
        _tile("computed", _short(frame.last("computed")), "tokens/s", frame.courses.get("computed"), PREFILL),
        _tile("hit rate", f"{found / asked:.0%}" if asked else "–", f"of {_short(asked)} tokens",
              frame.courses.get("hits"), CACHED),
        _tile("KV in use", f"{used:.0%}", f"of {_short(total)} pages", frame.courses.get("pages_pinned"), HIT),
        _tile("first token", _seconds(ttft and ttft[0]), f"p99 {_seconds(ttft and ttft[1])}", None, QUIET),
        _tile("between tokens", _seconds(itl and itl[0]), f"p99 {_seconds(itl and itl[1])}", None, QUIET),
    ))  # fmt: skip


def steps_head(frame: Frame) -> str:
    """What stands above the steps."""
    rate = frame.last("steps")
    last = frame.steps[-1] if frame.steps else None
    words = "no step yet" if last is None else (
        f"{rate:.1f} steps a second, the newest {len(frame.steps)}; preemptions {frame.value('preemptions'):.0f}, "
        f"evicted pages {frame.value('evicted_pages'):.0f}, recomputed tokens {frame.value('recomputed_tokens'):.0f}"
    )  # fmt: skip
    return f"<h2>Steps <small>{words}</small></h2>"


def kinds(frame: Frame) -> str:
    """What the colours of the lanes mean."""
    lanes = {cell[0] for one in frame.steps[-1:] for cell in one.cells}
    shown = "".join(f'<span><i style="background:{colour}"></i>{words}</span>' for words, colour in KINDS.values())
    of = f"{len(lanes)} of {frame.steps[-1].rows} requests of the newest step" if frame.steps else "requests"
    return f'<div class="keys"><span>who computed: {of}</span>{shown}</div>'


def queue(frame: Frame) -> str:
    """The queue: how many wait for what, and the first of them."""
    told = frame.look.get("queue") or {"first": [], "reasons": {}, "beyond": 0, "length": 0, "parked": 0}
    count, parked = told["length"], told["parked"]
    head = f"<h2>Queue <small>{count:.0f} wait{f', {parked:.0f} not ready' if parked else ''}</small></h2>"
    if not told["first"]:
        return head + '<div class="none">Nobody waits.</div>'
    reasons = sorted(told["reasons"].items(), key=lambda one: -one[1])
    bar = "".join(f'<i style="flex:{n};background:{_colour(why)}"></i>' for why, n in reasons)
    keys = "".join(f'<span><i style="background:{_colour(why)}"></i>{escape(why)} {n}</span>' for why, n in reasons)
    more = f"<span>{told['beyond']} beyond</span>" if told["beyond"] else ""
    tenants = any(one["tenant"] for one in told["first"])
    head_row = ("<tr><th>#</th><th>request</th>" + ("<th>tenant</th>" if tenants else "")
                + '<th>waits for</th><th class="n">prompt</th><th class="n">since</th></tr>')  # fmt: skip
    rows = "".join(_row(one, tenants) for one in told["first"])
    table = f'<table class="waits"><thead>{head_row}</thead><tbody>{rows}</tbody></table>'
    return (f'{head}<div class="reasons">{bar}</div><div class="keys">{keys}{more}</div>'
            f'<div class="scroll">{table}</div>')  # fmt: skip


def pages_head(frame: Frame) -> str:
    """What stands above the map of pages."""
    found = frame.look.get("pages")
    each = f"a cell is {found['pages']} pages" if found and found["pages"] > 1 else "a cell is a page"
    age = frame.look["now"] - found["began"] if found else 0
    old = f", {age:.0f} s old" if age >= 2 else ""
    size = frame.about.get("page_size")
    of = f" of {size} tokens" if size else ""
    return f"<h2>KV pages <small>{frame.value('pages_total'):.0f}{of}; {each}{old}</small></h2>"


def tree_head(frame: Frame) -> str:
    """What stands above the cache's tree."""
    shown = len(frame.look.get("tree") or ())
    return f"<h2>Radix tree <small>the newest {shown} nodes; bright: in use now</small></h2>"


def hooks(frame: Frame) -> str:
    """Who is asked by which hook, in which order, and who was at fault."""
    faults = {fault["plugin"]: fault for fault in frame.look.get("faults", ())}
    rows = []
    for hook, names in (frame.look.get("hooks") or {}).items():
        asked = "".join(_plugin(name, faults.get(name)) for name in names) or "–"
        rows.append(f"<div><code>{escape(hook)}</code>{asked}</div>")
    off = [f"{name} (disabled)" for name, fault in faults.items() if fault["disabled"]]
    if off:
        rows.append("<div><code>out</code>" + "".join(_plugin(name, {}) for name in off) + "</div>")
    return f'<h2>Hooks <small>who is asked, in this order</small></h2><div class="asked">{"".join(rows)}</div>'


def _plugin(name: str, fault: Mapping[str, Any] | None) -> str:
    if fault is None:
        return _chip(name)
    kinds = ", ".join(f"{kind} {count}" for kind, count in fault.get("kinds", {}).items())
    return f'<span class="chip bad">{escape(name)} {escape(kinds)}</span>'


def _row(one: Mapping[str, Any], tenants: bool) -> str:
    why, words = str(one["why"]), str(one["words"])
    told = f"priority {one['priority']}, {one['output_tokens']} tokens of output, preempted {one['preemptions']} times"
    tenant = f'<td title="{escape(one["tenant"])}">{escape(one["tenant"])}</td>' if tenants else ""
    return (
        f'<tr title="{escape(told)}"><td>{one["place"]}</td><td>{escape(one["id"])}</td>{tenant}'
        f'<td title="{escape(words)}"><span class="why" style="color:{_colour(why)}">{escape(why)}</span> '
        f'{escape(words)}</td><td class="n">{one["prompt_tokens"]}</td><td class="n">{one["seconds"]:.1f} s</td></tr>'
    )


def _parked(frame: Frame) -> str:
    parked = frame.value("parked")
    return f"{parked:.0f} not ready" if parked else "requests"


def _chip(name: str, key: str = "") -> str:
    return f'<span class="chip">{f"<em>{escape(key)}</em>" if key else ""}{escape(name)}</span>'


def _tile(name: str, value: str, more: str, course: Sequence[float] | None, colour: str) -> str:
    return (f'<div class="tile">{spark(course or (), colour)}<div><p>{escape(name)}</p>'
            f"<strong>{escape(value)}<small>{escape(more)}</small></strong></div></div>")  # fmt: skip


def spark(course: Sequence[float], colour: str) -> str:
    """A small picture of a course."""
    if len(course) < 2:
        return ""
    top, last = max(max(course), 1e-9), len(course) - 1
    points = " ".join(f"{100 * place / last:.1f},{24 - 20 * max(0.0, value) / top:.1f}"
                      for place, value in enumerate(course))  # fmt: skip
    return (f'<svg viewBox="0 0 100 26" preserveAspectRatio="none"><polygon points="0,26 {points} 100,26" '
            f'fill="{colour}" fill-opacity="0.25"></polygon><polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="1.5" vector-effect="non-scaling-stroke"></polyline></svg>')  # fmt: skip


def _colour(why: str) -> str:
    return WHY_COLOURS.get(why, QUIET)


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            value, unit = value / (1e3 if letter == "k" else size), letter
            return f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
