"""What was measured, of simulated engines or of real ones, as tables for people and files for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from engine.lab import SLO, Results

SECONDS = ("queue", "ttft", "tpot", "itl", "stall", "e2e", "handoff", "late")
Progress = Callable[[int, int, float], None]


@contextmanager
def progress(words: str) -> Iterator[Progress]:
    """A bar on standard error, where that is a terminal. ``words`` follow the seconds that have passed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    shared = sys.stdout.isatty()  # then lines are printed above the bar; else they stay out of each other's way
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off, redirect_stdout=shared) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, now: bar.update(task, completed=done, total=total, description=f"{now:,.0f} {words}")


def write(results: Results, slo: SLO, to_json: str | None, to_csv: Path | None) -> None:
    """Write what is to be written, and show the rest."""
    from engine.lab.measured import write_csv

    if to_csv is not None:
        write_csv(to_csv, results.requests)
    if to_json is not None:
        write_json(results.plain(slo, each=True), to_json)
    if to_json != "-":
        show(results, results.summary(slo))


def write_json(value: Any, to: str, *, indent: int = 2) -> None:
    """Into a file; ``-``: here."""
    text = json.dumps(value, indent=indent)
    if to == "-":
        typer.echo(text)
    else:
        Path(to).write_text(text + "\n", encoding="utf-8")


def show(results: Results, summary: Mapping[str, Any]) -> None:
    """Tables for people."""
    from rich.console import Console

    console = Console(highlight=False)
    ends = ", ".join(f"{count} {finish}" for finish, count in sorted(summary["ends"].items()))
    seconds = "seconds" if results.client is not None else "simulated seconds"
    console.print(f"{summary['requests']} requests ({ends}) in {summary['seconds']:.1f} {seconds}", soft_wrap=True)
    console.print(", ".join(_rates(summary)), soft_wrap=True)
    if summary["slo"]["limits"]:
        console.print(goodput(summary), soft_wrap=True)
    console.print(table(summary))
    if results.client is None:
        cpu = max(results.cpu, 1e-9)
        rates = f"{summary['requests'] / cpu:.0f} requests, {summary['steps'] / cpu:.0f} steps a second of CPU"
        console.print(f"simulated in {results.wall:.1f} s: {rates}", soft_wrap=True)
        return
    for line in client(summary):
        console.print(line, soft_wrap=True)


def _rates(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"{summary['requests_per_second']:.2f} requests/s"
    yield f"{summary['output_tokens_per_second']:.0f} tokens/s out"
    yield f"{summary['prompt_tokens_per_second']:.0f} in"
    yield f"{summary['cached_share']:.1%} of prompts cached"
    if summary["preemptions"] is not None:
        yield f"{summary['preemptions']} preemptions"
    if summary.get("rows_a_step") is not None:
        yield f"{summary['rows_a_step']:.1f} rows a step"
    if "busy_share" in summary:
        yield f"devices busy {summary['busy_share']:.0%}"


def goodput(summary: Mapping[str, Any]) -> str:
    """Requests a second within the SLO, in words."""
    slo = summary["slo"]
    over = ", ".join(f"{count} over {name}" for name, count in slo["over"].items())
    limits = ",".join(f"{name}={limit:g}" for name, limit in slo["limits"].items())
    return f"goodput {slo['goodput']:.2f} requests/s: {slo['share']:.1%} keep {limits} ({over})"


def client(summary: Mapping[str, Any]) -> Iterator[str]:
    """How the client that measured did, in words; why not to believe it."""
    told = summary["client"]
    words = [f"most requests open at once {told['most_open']}"]
    if told["late"]["p99"] is not None:
        words.append(f"sent late by {told['late']['p50'] * 1e3:.1f} ms (p99 {told['late']['p99'] * 1e3:.1f})")
    if told["cpu_share"]:
        words.append(f"client used {told['cpu_share']:.0%} of a core")
    if told["tokens_a_chunk"] > 1.01:
        words.append(f"{told['tokens_a_chunk']:.2f} tokens a chunk (itl is between chunks)")
    yield ", ".join(words)
    for doubt in told["doubts"]:
        yield f"warning: the client itself was a bottleneck: {doubt}"


def table(summary: Mapping[str, Any]) -> Any:
    """Percentiles of all times, in seconds."""
    known = [name for name in SECONDS if summary[name]["mean"] is not None]
    lines = [[name, *(f"{value:.4f}" for value in summary[name].values())] for name in known]
    return rows(["seconds", "mean", "p50", "p90", "p95", "p99", "max"], lines)


def rows(names: Sequence[str], lines: Sequence[Sequence[str]]) -> Any:
    """A table of lines, numbers to the right."""
    from rich.table import Table

    found = Table(*names, box=None, pad_edge=False)
    for column in found.columns[1:]:
        column.justify = "right"
    for line in lines:
        found.add_row(*line)
    return found
