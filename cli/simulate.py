"""``engine simulate``: a workload on engines whose time is modelled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli.flags import with_config
from engine.cli.generate import SERVER_ONLY
from engine.core.config import LoadedConfig, Selection
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.lab import Fitted, Results
    from engine.lab.simulation import Progress

WITHOUT = (
    *SERVER_ONLY, "executor", "attention", "grammar", "tool_parser", "connectors", "ask_seconds", "grammar_seconds",
    "grammar_threads", "max_grammar_bytes", "cache_events", "cache_events_replay", "cache_events_topic",
    "cache_events_tokens", "cache_events_history",
)  # fmt: skip
LOGGED = ("num_pages", "page_size", "max_batch_tokens", "max_running", "max_model_len")
EXAMPLE = "poisson:rate=8,requests=1000,prompt=lognormal:512:1,output=exp:128"


@with_config(without=WITHOUT, checked=True)
def simulate(
    *,
    loaded: LoadedConfig,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", help=f"What arrives, e.g. {EXAMPLE} (repeatable: all at once).", metavar="TEXT"),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="Device of each engine.", metavar="NAME")] = "h100",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", help="Devices that share every layer of an engine.", min=1)
    ] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="Numbers of the weights.", metavar="NAME")] = "bfloat16",
    replicas: Annotated[int, typer.Option("--replicas", help="Engines that answer.", min=1)] = 1,
    prefill_replicas: Annotated[
        int, typer.Option("--prefill-replicas", help="Engines that compute prompts for them (0: none).", min=0)
    ] = 0,
    router: Annotated[
        str, typer.Option("--router", help="round-robin, least-open, least-tokens or prefix.", metavar="NAME")
    ] = "round-robin",
    link_gbps: Annotated[
        float, typer.Option("--link-gbps", help="Gigabits a second of KV to and from an engine.")
    ] = 200,
    link_ms: Annotated[float, typer.Option("--link-ms", help="Latency of a transfer of KV.")] = 1.0,
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo", help="Limits that count, e.g. ttft=1.0,itl=0.05 (also tpot, e2e, queue).", metavar="TEXT"
        ),
    ] = None,
    cost: Annotated[
        Path | None, typer.Option("--cost", help="Fitted cost of steps, instead of that of --gpu.", metavar="FILE")
    ] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option("--fit", help="Fit the cost to this decision log first (repeatable).", metavar="LOG"),
    ] = None,
    save_cost: Annotated[
        Path | None, typer.Option("--save-cost", help="Keep what --fit has found.", metavar="FILE")
    ] = None,
    to_json: Annotated[
        str | None, typer.Option("--json", help="Write all results; - writes them here, and no table.", metavar="FILE")
    ] = None,
    to_csv: Annotated[Path | None, typer.Option("--csv", help="Write a line for each request.", metavar="FILE")] = None,
) -> None:
    """Run a workload on engines whose time is modelled: real schedulers, caches and policies, no GPU, no waiting.

    Options of plugins are flags, as for `engine serve`; those of the modelled device, too: --executor.host-ms 2.
    """
    from engine.lab import SLO, Fleet, Simulation, load_fitted, together
    from engine.lab import workload as made

    limits = SLO.parse(slo) if slo else SLO()
    fitted = _fit(fit or [], save_cost)
    if not workload:
        if fit:
            return
        raise ConfigError(f"--workload says what arrives, e.g. --workload {EXAMPLE}")
    fitted = fitted if cost is None else load_fitted(cost)
    given = {"gpu": gpu, "tensor_parallel": tensor_parallel, "dtype": dtype, **_of_flags(loaded)}
    if fitted is not None:
        given.setdefault("host_ms", 0.0 if not fitted.about.get("overlap") else 1.0)
    from engine.lab.executor import WHERE

    update = {**_as_logged(loaded, fitted), "executor": Selection(name=WHERE, options=given)}
    config = loaded.config.model_copy(update=update)
    arrivals = together([made(text, config.seed) for text in workload])
    fleet = Fleet(replicas=replicas, prefill=prefill_replicas, router=router, link_gbps=link_gbps, link_ms=link_ms)
    with _progress() as progress:
        results = Simulation(config, arrivals, fleet, cost=fitted, progress=progress).run()
    _write(results, limits, to_json, to_csv)


def _as_logged(loaded: LoadedConfig, fitted: Fitted | None) -> dict[str, Any]:
    """Limits of the engine whose steps the cost was fitted to, where nobody has set others."""
    limits = {} if fitted is None else fitted.about.get("limits", {})
    return {name: limits[name] for name in LOGGED if name in limits and name not in loaded.origins}


def _of_flags(loaded: LoadedConfig) -> dict[str, Any]:
    """Options of the modelled device. What a file says of the executor is of another one."""
    flags = {key for key, origin in loaded.origins.items() if origin.startswith("flag ")}
    return {key: value for key, value in loaded.config.executor.options.items() if f"executor.{key}" in flags}


def _fit(logs: Sequence[Path], save: Path | None) -> Fitted | None:
    if not logs:
        if save is not None:
            raise ConfigError("--save-cost keeps what --fit has found: give it a log")
        return None
    from engine.lab import fit_log

    found = fit_log(logs)
    about = found.about
    typer.echo(
        f"fitted to {about['steps']} steps ({about['left_out']} left out): off by {about['error_mean']:.1%} a step in "
        f"the mean, p99 {about['error_p99']:.1%}, all steps together {about['error_total']:+.1%}"
    )
    for name, seconds in found.weights.items():
        typer.echo(
            f"  {name:<16} {seconds * 1e6:12.4f} µs" + (f" beyond {found.knee}" if name.startswith("steep") else "")
        )
    if save is not None:
        found.save(save)
    return found


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on standard error, where that is a terminal."""
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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, description=f"{now:,.0f} simulated seconds"
        )


def _write(results: Results, slo: Any, to_json: str | None, to_csv: Path | None) -> None:
    from engine.lab.measured import write_csv

    if to_csv is not None:
        write_csv(to_csv, results.requests)
    if to_json is not None:
        text = json.dumps(results.plain(slo, each=True), indent=2)
        if to_json == "-":
            typer.echo(text)
            return
        Path(to_json).write_text(text + "\n", encoding="utf-8")
    show(results, results.summary(slo))


def show(results: Results, summary: Mapping[str, Any]) -> None:
    """Tables for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    ends = ", ".join(f"{count} {finish}" for finish, count in sorted(summary["ends"].items()))
    console.print(
        f"{summary['requests']} requests ({ends}) in {summary['seconds']:.1f} simulated seconds", soft_wrap=True
    )
    console.print(
        f"{summary['requests_per_second']:.2f} requests/s, {summary['output_tokens_per_second']:.0f} tokens/s out, "
        f"{summary['prompt_tokens_per_second']:.0f} in, {summary['cached_share']:.1%} of prompts cached, "
        f"{summary['preemptions']} preemptions, {summary['rows_a_step']:.1f} rows a step, "
        f"devices busy {summary['busy_share']:.0%}",
        soft_wrap=True,
    )
    slo = summary["slo"]
    if slo["limits"]:
        over = ", ".join(f"{count} over {name}" for name, count in slo["over"].items())
        limits = ",".join(f"{name}={limit:g}" for name, limit in slo["limits"].items())
        console.print(
            f"goodput {slo['goodput']:.2f} requests/s: {slo['share']:.1%} keep {limits} ({over})", soft_wrap=True
        )
    table = Table("seconds", *("mean", "p50", "p90", "p95", "p99", "max"), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("queue", "ttft", "tpot", "itl", "stall", "e2e", "handoff"):
        if summary[name]["mean"] is not None:
            table.add_row(name, *(f"{value:.4f}" for value in summary[name].values()))
    console.print(table)
    cpu = max(results.cpu, 1e-9)
    rates = f"{summary['requests'] / cpu:.0f} requests, {summary['steps'] / cpu:.0f} steps a second of CPU"
    console.print(f"simulated in {results.wall:.1f} s: {rates}", soft_wrap=True)
