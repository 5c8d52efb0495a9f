"""``engine config``: the effective configuration, and where each value came from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from engine.cli.flags import with_config
from engine.core.config import LoadedConfig
from engine.core.errors import ConfigError


@with_config()
def config(
    *,
    loaded: LoadedConfig,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="As a file for --config, all defaults written out.")] = False,
) -> None:
    """Print the effective configuration: every value, options of the selected plugins included, and its origin.

    Takes all flags of `engine serve`. Exit code 2 where `engine serve` would refuse to start. Secrets are not shown.
    """
    from engine.core.capabilities import check_capabilities
    from engine.core.effective import Effective
    from engine.core.registry import Registry, build
    from engine.core.values import readable

    if as_json and as_toml:
        raise ConfigError("--json and --toml: one of them")
    registry = Registry()
    effective = Effective(loaded, registry)
    built = [build(chosen.found, chosen.selected.selection) for chosen in effective.plugins]
    try:
        check_capabilities([plugin for plugin, chosen in zip(built, effective.plugins, strict=True)
                            if chosen.found.role != "frontend"])  # fmt: skip
    finally:
        for plugin in built:
            plugin.close()
    if as_toml:
        typer.echo(effective.as_toml(), nl=False)
    elif as_json:
        typer.echo(json.dumps(for_programs(effective), indent=2))
    else:
        rows = [(key, readable(value), effective.origins[key]) for key, value in effective.values()]
        widths = [max(len(row[0]) for row in rows), max(min(len(row[1]), 30) for row in rows)]
        for key, value, origin in rows:
            typer.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def for_programs(effective: Any) -> dict[str, Any]:
    """Values and origins by dotted key, and who the selected plugins are."""
    plugins = [
        {
            "role": chosen.found.role,
            "name": chosen.found.cls.name,
            "key": chosen.selected.key,
            "distribution": chosen.found.distribution,
            "version": chosen.found.version,
        }
        for chosen in effective.plugins
    ]
    return {"values": dict(effective.values()), "origins": effective.origins, "plugins": plugins}
