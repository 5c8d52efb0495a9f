"""``engine bench``: a load on a server, on an engine inside, or on modelled ones; searches and matrices of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.cli._simulated import (
    GPU,
    Cost,
    DType,
    LinkGbps,
    LinkMs,
    PrefillReplicas,
    Replicas,
    RouterName,
    SLOText,
    TensorParallel,
    ToJSON,
    modelled,
)
from engine.cli.flags import with_config
from engine.cli.generate import SERVER_ONLY
from engine.cli.simulate import WITHOUT as NOT_SIMULATED
from engine.core.config import EngineConfig, LoadedConfig
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.lab.jobs import Job
    from engine.lab.matrix import Combination
    from engine.lab.searching import Probe

WITHOUT = tuple(name for name in SERVER_ONLY if name not in ("heartbeat_timeout", "step_timeout"))
FIELDS = tuple(name for name in EngineConfig.model_fields if name not in WITHOUT)
SIMULATED_FIELDS = tuple(name for name in FIELDS if name not in NOT_SIMULATED)
OF_CLIENT = ("seed", "model")  # fields that mean something without an engine inside


@with_config(without=WITHOUT)
def bench(
    *,
    loaded: LoadedConfig,
    url: Annotated[
        str | None, typer.Option("--url", help="A server to load, instead of an engine inside.", metavar="URL")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", help="What arrives, as for engine simulate (repeatable).", metavar="TEXT"),
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, instead of the workload's.")] = None,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", help="How many, instead of the workload's.", min=1)
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", help="Requests before, all at once, that are not counted.", min=0)
    ] = 1,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds after which a request is given up.")] = 600.0,
    slo: SLOText = None,
    search: Annotated[
        bool, typer.Option("--find-rate", help="Search the highest rate that meets --slo, from --rate on.")
    ] = False,
    share: Annotated[float, typer.Option("--share", help="Share of the requests that must keep the SLO.")] = 0.9,
    precision: Annotated[float, typer.Option("--precision", help="How near the search comes to the rate.")] = 0.05,
    matrix: Annotated[
        list[str] | None,
        typer.Option("--matrix", help="NAME=VALUE,VALUE: each of them, with each of the others.", metavar="AXIS"),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="How often each combination is run, in turns.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep each run there; the same command goes on.", metavar="DIR")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page with plots.", metavar="HTML")] = None,
    to_json: ToJSON = None,
    to_csv: Annotated[
        Path | None, typer.Option("--csv", help="Write a line for each request, or for each run.", metavar="FILE")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="ENGINE_API_KEY", help="What the server wants.", metavar="KEY")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in words, as a chat, instead of token ids.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Of the server's model: folder, file or hub id.", metavar="NAME")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", help="Token ids of the server's model are below it.", min=2)
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option("--extra-body", help="Fields of every request's body; null takes one away.",
                                 metavar="JSON"),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Engine in a thread, not a process of its own.")
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Engines whose time is modelled, as engine simulate.")
    ] = False,
    gpu: GPU = "h100",
    tensor_parallel: TensorParallel = 1,
    dtype: DType = "bfloat16",
    replicas: Replicas = 1,
    prefill_replicas: PrefillReplicas = 0,
    router: RouterName = "round-robin",
    link_gbps: LinkGbps = 200,
    link_ms: LinkMs = 1.0,
    cost: Cost = None,
) -> None:  # fmt: skip
    """Measure an engine under a load that waits for no answer: percentiles, goodput, the highest rate within an SLO.

    --url loads any OpenAI-compatible server; without it, an engine with the flags of `engine serve` runs inside.
    """
    from engine.lab.jobs import DEFAULT_WORKLOAD, Job, plain
    from engine.lab.matrix import axis, combinations

    if report is not None:
        from engine.lab.report import need

        need()  # before anything is measured
    fields: dict[str, Any] = {
        "workloads": tuple(workload or (DEFAULT_WORKLOAD,)), "seed": loaded.config.seed, "rate": rate,
        "requests": num_requests, "slo": slo or "", "warm_up": warm_up, "timeout": timeout,
    }  # fmt: skip
    config = loaded.config
    if simulated:
        if url is not None:
            raise ConfigError("--simulated and --url: what is measured is one of them")
        from engine.lab import load_fitted

        fitted = None if cost is None else load_fitted(cost)
        config = modelled(loaded, fitted, {"gpu": gpu, "tensor_parallel": tensor_parallel, "dtype": dtype})
        fleet = {"replicas": replicas, "prefill": prefill_replicas, "router": router, "link_gbps": link_gbps,
                 "link_ms": link_ms}  # fmt: skip
        fields |= {"kind": "simulated", "fleet": fleet, "cost": None if cost is None else str(cost)}
    elif url is not None:
        fields |= {"kind": "endpoint", "endpoint": {
            "url": url, "api_key": api_key, "model": _model(loaded), "vocab": vocab_size, "tokenizer": tokenizer,
            "chat": chat, "extra": _object(extra_body),
        }}  # fmt: skip
    if search:
        first = rate if rate is not None else 1.0
        fields |= {"rate": None, "search": {"first": first, "share": share, "precision": precision}}
    job = Job(config={} if url is not None else plain(config), in_process=in_process, **fields)
    known = SIMULATED_FIELDS if simulated else FIELDS
    found = combinations(job, config, [axis(text) for text in matrix or ()], fields=known)
    for one in found:
        one.job.workload()  # what is wrong with it is said before anything is measured
    if matrix or rounds > 1 or out is not None:
        _many(found, rounds, out, report, to_json, to_csv)
    else:
        _one(job, report, to_json, to_csv)


def _model(loaded: LoadedConfig) -> str | None:
    """The server's model. Raises ``ConfigError`` where flags are for an engine that there is not."""
    flags = [origin.removeprefix("flag ") for key, origin in loaded.origins.items()
             if origin.startswith("flag ") and key not in OF_CLIENT]  # fmt: skip
    if flags:
        raise ConfigError(f"{', '.join(flags)}: the server that --url names is as it was started")
    return loaded.config.model if loaded.origins.get("model", "").startswith("flag ") else None


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError('--extra-body is no object such as {"ignore_eos": true}')
    return found


def _one(job: Job, report: Path | None, to_json: str | None, to_csv: Path | None) -> None:
    """One run, or one search, here."""
    from engine.cli._measured import progress, show, write, write_json
    from engine.lab.jobs import run
    from engine.lab.measured import write_csv
    from engine.lab.searching import Found

    quiet = to_json == "-"
    with progress("simulated seconds" if job.kind == "simulated" else "seconds") as bar:
        came = run(job, progress=bar, tell=lambda probe: typer.echo(_probed(probe), err=quiet))
    limits = job.limits()
    data: dict[str, Any] = {"choice": {}, "round": 1}
    if isinstance(came, Found):
        data |= {"found": came.plain(limits), "words": came.words()}
        if to_csv is not None:
            write_csv(to_csv, came.best.requests if came.best is not None else ())
        if to_json is not None:
            write_json(data["found"], to_json)
        if not quiet:
            if came.best is not None:
                show(came.best, came.best.summary(limits))
            typer.echo(came.words())
    else:
        data |= {"measured": came.plain(limits, each=True)}
        write(came, limits, to_json, to_csv)
    if report is not None:
        _report(report, job, [data], quiet)


def _probed(probe: Probe) -> str:
    verdict = "meets it" if probe.met else "misses it"
    words = f"{probe.rate:8.3f} requests/s: {probe.share:6.1%} keep the SLO, goodput {probe.goodput:.3f}: {verdict}"
    return words + "".join(f"\n         warning: {doubt}" for doubt in probe.doubts)


def _many(
    found: list[Combination], rounds: int, out: Path | None, report: Path | None, to_json: str | None,
    to_csv: Path | None,
) -> None:  # fmt: skip
    """A matrix, over rounds."""
    from engine.cli._cells import run_cells, show_cells, write_cells
    from engine.lab.cells import Kept, in_turns

    settings = _settings(found, rounds)
    kept = None if out is None else Kept(out, settings)
    cells = run_cells([*in_turns(found, rounds)], kept, quiet=to_json == "-")
    write_cells(settings, cells, to_json, to_csv)
    if to_json != "-":
        show_cells(cells)
    if report is not None:
        _report(report, found[0].job, cells, to_json == "-")
    if all(cell.get("died") for cell in cells):
        raise typer.Exit(1)


def _settings(found: list[Combination], rounds: int) -> dict[str, Any]:
    """All that shapes what is measured, without the key."""
    from importlib.metadata import version

    each = []
    for one in found:
        job = one.job.model_dump()
        job["endpoint"].pop("api_key", None)
        each.append({"choice": one.choice, "job": job})
    return {"version": version("sixhooks"), "rounds": rounds, "combinations": each}


def _report(file: Path, job: Job, cells: list[dict[str, Any]], quiet: bool) -> None:
    from engine.lab.report import page

    file.write_text(page(job, cells), encoding="utf-8")
    typer.echo(f"report: {file}", err=quiet)
