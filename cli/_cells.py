"""Cells run one after the other, each in a process of its own, with bars; and what came of them all."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from engine.cli._measured import rows, write_json

if TYPE_CHECKING:
    from engine.lab.cells import Cell, Kept
    from engine.lab.jobs import Job

CHILD = "from engine.cli.bench_cell import main; main()"
SHOWN = ("rate", "goodput", "kept_share", "requests_per_second", "output_tokens_per_second", "ttft_p50", "ttft_p99",
         "itl_p50", "itl_p99", "cached_share")  # fmt: skip
WORST = 2000  # characters of a dead process's last words

Tell = Callable[[dict[str, Any]], None]


def run_cells(cells: Sequence[Cell], kept: Kept | None, *, quiet: bool = False) -> list[dict[str, Any]]:
    """Run what is not finished; returns all cells, in the order of ``cells``. One that dies does not end the others.

    Args:
        quiet: a line for each goes to standard error: standard output is for something else.
    """
    found: list[dict[str, Any]] = []
    with _bars(len(cells)) as (bar, tell):
        for cell in cells:
            head = {"choice": cell.combination.choice, "round": cell.round}
            data = None if kept is None else kept.read(cell)
            again = data is not None
            bar(len(found), f"{cell.combination.words}, round {cell.round}")
            if data is None:
                data = {**head, **in_process_of_its_own(cell.combination.job, tell)}
                if kept is not None:
                    kept.keep(cell, data)
            found.append(data)
            bar(len(found), "")
            typer.echo(
                f"[{len(found)}/{len(cells)}] {cell.combination.words}: {_came(data)}" + " (kept)" * again, err=quiet
            )
    return found


def _came(data: Mapping[str, Any]) -> str:
    """A cell in one line."""
    if data.get("died"):
        return f"died: {data['died'].splitlines()[-1]}"
    if "found" in data:
        return str(data["words"])
    summary = data["measured"]["summary"]
    words = [f"{summary['requests_per_second']:.2f} requests/s"]
    if summary["slo"]["limits"]:
        words.append(f"goodput {summary['slo']['goodput']:.2f} ({summary['slo']['share']:.0%} kept)")
    for name in ("ttft", "itl"):
        if summary[name]["p50"] is not None:
            words.append(f"{name} {summary[name]['p50'] * 1e3:.1f} ms, p99 {summary[name]['p99'] * 1e3:.1f}")
    words += [f"warning: {doubt}" for doubt in summary.get("client", {}).get("doubts", ())]
    return ", ".join(words)


def in_process_of_its_own(job: Job, tell: Tell) -> dict[str, Any]:
    """What a job came to; ``died`` says how its process ended, where that was no result."""
    told = json.dumps({"path": sys.path, "job": job.model_dump()})
    last: dict[str, Any] = {}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdout, process.stdin:
                try:
                    process.stdin.write(told + "\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    pass  # it died at once: its exit code says so
                for line in process.stdout:
                    last = json.loads(line)
                    tell(last)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        if "result" in last:
            result: dict[str, Any] = last["result"]
            return result
        if "refused" in last:
            return {"died": last["refused"]}
        errors.seek(0)
        words = errors.read().decode(errors="replace")[-WORST:].strip()
    end = f"by signal {-code}" if code < 0 else f"with exit status {code}"
    return {"died": f"{words}\nits process ended {end}".strip()}


@contextmanager
def _bars(total: int) -> Iterator[tuple[Callable[[int, str], None], Tell]]:
    """Bars on standard error, where that is a terminal: one of cells, one of the requests of the cell that runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    shared = sys.stdout.isatty()  # then lines are printed above the bars; else they stay out of each other's way
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off, redirect_stdout=shared) as bars:
        cells = bars.add_task("", total=total, what="cells")
        requests = bars.add_task("", total=None, what="requests")

        def tell(news: dict[str, Any]) -> None:
            if "progress" in news:
                done, of, seconds = news["progress"]
                bars.update(requests, completed=done, total=of, description=f"{seconds:,.0f} s")
            if "probe" in news:
                probe = news["probe"]
                bars.update(cells, description=f"{probe['rate']:.3g}/s: {probe['share']:.0%} kept")

        def at(done: int, words: str) -> None:
            bars.update(cells, completed=done, description=words)
            bars.reset(requests)

        yield at, tell


def show_cells(cells: Sequence[Mapping[str, Any]]) -> None:
    """A line for each combination: medians over its rounds."""
    from rich.console import Console

    from engine.lab.cells import over_rounds

    found = over_rounds(cells)
    axes = list(dict.fromkeys(name for one in found for name in one.choice))
    shown = [n for n in SHOWN if n not in axes and any(one.median.get(n) is not None for one in found)]
    lines = []
    for one in found:
        figures = [_figure(one.median.get(name)) for name in shown]
        died = f"{len(one.died)} died" if one.died else ""
        lines.append([*(one.choice.get(name, "-") or "none" for name in axes), str(one.rounds), *figures, died])
    names = [name.replace("_per_second", "/s").replace("_", " ") for name in shown]
    console = Console(highlight=False, width=max(200, Console().width))
    console.print(rows([*(axes or ["cells"]), "rounds", *names, ""], lines if axes else [["", *x] for x in lines]))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def write_cells(
    settings: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], to_json: str | None, to_csv: Path | None
) -> None:
    """All cells as JSON, and a line each as CSV."""
    from engine.lab.cells import line_of

    if to_json is not None:
        write_json({"settings": settings, "cells": cells}, to_json, indent=1)
    if to_csv is not None:
        lines = [line_of(data) for data in cells]
        names = list(dict.fromkeys(name for line in lines for name in line))
        with to_csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(lines)
