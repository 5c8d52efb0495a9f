"""Flags of modelled engines, which several commands have, and what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.core.config import EngineConfig, LoadedConfig, Selection
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.lab import Fitted

GPU = Annotated[str, typer.Option("--gpu", help="Device of each engine.", metavar="NAME")]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel", help="Devices that share every layer of an engine.", min=1)
]
DType = Annotated[str, typer.Option("--dtype", help="Numbers of the weights.", metavar="NAME")]
Replicas = Annotated[int, typer.Option("--replicas", help="Engines that answer.", min=1)]
PrefillReplicas = Annotated[
    int, typer.Option("--prefill-replicas", help="Engines that compute prompts for them (0: none).", min=0)
]
RouterName = Annotated[
    str, typer.Option("--router", help="round-robin, least-open, least-tokens or prefix.", metavar="NAME")
]
LinkGbps = Annotated[float, typer.Option("--link-gbps", help="Gigabits a second of KV to and from an engine.")]
LinkMs = Annotated[float, typer.Option("--link-ms", help="Latency of a transfer of KV.")]
Cost = Annotated[
    Path | None, typer.Option("--cost", help="Fitted cost of steps, instead of that of --gpu.", metavar="FILE")
]
SLOText = Annotated[
    str | None,
    typer.Option(
        "--slo", help="Limits that count, e.g. ttft=1.0,itl=0.05 (also tpot, stall, e2e, queue).", metavar="TEXT"
    ),
]
ToJSON = Annotated[
    str | None, typer.Option("--json", help="Write all results; - writes them here, and no table.", metavar="FILE")
]
ToCSV = Annotated[Path | None, typer.Option("--csv", help="Write a line for each request.", metavar="FILE")]

LOGGED = ("num_pages", "page_size", "max_batch_tokens", "max_running", "max_model_len")


def modelled(loaded: LoadedConfig, fitted: Fitted | None, device: dict[str, Any]) -> EngineConfig:
    """The configuration of engines whose time is modelled.

    Args:
        fitted: how long steps take; limits are those of the engine that it was fitted to, where nobody set others.
        device: options of the modelled device; flags such as ``--executor.host-ms`` go before.
    """
    from engine.lab.executor import WHERE

    given = {**device, **_of_flags(loaded)}
    if fitted is not None:
        given.setdefault("host_ms", 0.0 if not fitted.about.get("overlap") else 1.0)
    update = {**_as_logged(loaded, fitted), "executor": Selection(name=WHERE, options=given)}
    return loaded.config.model_copy(update=update)


def _as_logged(loaded: LoadedConfig, fitted: Fitted | None) -> dict[str, Any]:
    """Limits of the engine whose steps the cost was fitted to, where nobody has set others."""
    limits = {} if fitted is None else fitted.about.get("limits", {})
    return {name: limits[name] for name in LOGGED if name in limits and name not in loaded.origins}


def _of_flags(loaded: LoadedConfig) -> dict[str, Any]:
    """Options of the modelled device. What a file says of the executor is of another one."""
    flags = {key for key, origin in loaded.origins.items() if origin.startswith("flag ")}
    return {key: value for key, value in loaded.config.executor.options.items() if f"executor.{key}" in flags}


def fit_to(logs: Sequence[Path], save: Path | None) -> Fitted | None:
    """Fit a cost to decision logs, say how well it does, keep it. Raises ``ConfigError``."""
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
