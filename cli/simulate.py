"""``engine simulate``: a workload on engines whose time is modelled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.cli._measured import progress, write
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
    ToCSV,
    ToJSON,
    fit_to,
    modelled,
)
from engine.cli.flags import with_config
from engine.cli.generate import SERVER_ONLY
from engine.core.config import LoadedConfig
from engine.core.errors import ConfigError

WITHOUT = (
    *SERVER_ONLY, "executor", "attention", "grammar", "tool_parser", "connectors", "ask_seconds", "grammar_seconds",
    "grammar_threads", "max_grammar_bytes", "cache_events", "cache_events_replay", "cache_events_topic",
    "cache_events_tokens", "cache_events_history",
)  # fmt: skip
EXAMPLE = "poisson:rate=8,requests=1000,prompt=lognormal:512:1,output=exp:128"


@with_config(without=WITHOUT, checked=True)
def simulate(
    *,
    loaded: LoadedConfig,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", help=f"What arrives, e.g. {EXAMPLE} (repeatable: all at once).", metavar="TEXT"),
    ] = None,
    gpu: GPU = "h100",
    tensor_parallel: TensorParallel = 1,
    dtype: DType = "bfloat16",
    replicas: Replicas = 1,
    prefill_replicas: PrefillReplicas = 0,
    router: RouterName = "round-robin",
    link_gbps: LinkGbps = 200,
    link_ms: LinkMs = 1.0,
    slo: SLOText = None,
    cost: Cost = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option("--fit", help="Fit the cost to this decision log first (repeatable).", metavar="LOG"),
    ] = None,
    save_cost: Annotated[
        Path | None, typer.Option("--save-cost", help="Keep what --fit has found.", metavar="FILE")
    ] = None,
    to_json: ToJSON = None,
    to_csv: ToCSV = None,
) -> None:
    """Run a workload on engines whose time is modelled: real schedulers, caches and policies, no GPU, no waiting.

    Options of plugins are flags, as for `engine serve`; those of the modelled device, too: --executor.host-ms 2.
    """
    from engine.lab import SLO, Fleet, Simulation, load_fitted, together
    from engine.lab import workload as made

    limits = SLO.parse(slo) if slo else SLO()
    fitted = fit_to(fit or [], save_cost)
    if not workload:
        if fit:
            return
        raise ConfigError(f"--workload says what arrives, e.g. --workload {EXAMPLE}")
    fitted = fitted if cost is None else load_fitted(cost)
    config = modelled(loaded, fitted, {"gpu": gpu, "tensor_parallel": tensor_parallel, "dtype": dtype})
    arrivals = together([made(text, config.seed) for text in workload])
    fleet = Fleet(replicas=replicas, prefill=prefill_replicas, router=router, link_gbps=link_gbps, link_ms=link_ms)
    with progress("simulated seconds") as bar:
        results = Simulation(config, arrivals, fleet, cost=fitted, progress=bar).run()
    write(results, limits, to_json, to_csv)
