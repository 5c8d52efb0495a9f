"""From a configuration to a running engine core: select, check, load, size the pool, wire."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.core.config import EngineConfig, Selection, parse_bytes
from engine.core.errors import ConfigError
from engine.core.loop import EngineCore
from engine.core.protocols import Attention, Connector, Executor, KVCache, Limits, ModelInfo, Plugin, Policy, Scheduler
from engine.core.registry import Found, Registry, build, check_capabilities

log = logging.getLogger(__name__)

DEFAULT_PAGES_WITHOUT_KV = 4096


def assemble(
    config: EngineConfig, registry: Registry | None = None, *, core: type[EngineCore] = EngineCore
) -> EngineCore:
    """Build an engine core. Everything is selected and checked before the model is loaded.

    Args:
        core: the class to build, e.g. one that records what it decides.

    Raises:
        ConfigError: limits or options that contradict each other.
        PluginError: a selected plugin is unknown, broken or incompatible.
        ModelError: the model cannot be found or read.
    """
    registry = registry or Registry()
    chosen: list[tuple[Found, Plugin]] = []

    def pick(role: str, selection: Selection) -> Plugin:
        found = registry.select(role, selection.name)
        plugin = build(found, selection)
        chosen.append((found, plugin))
        return plugin

    scheduler = pick("scheduler", config.scheduler)
    kv = pick("kvcache", config.kvcache)
    policies = [pick("policy", selection) for selection in config.policies]
    connectors = [pick("connector", selection) for selection in config.connectors]
    executor = pick("executor", config.executor)  # late: importing one may take seconds, a misspelt name should not
    assert isinstance(scheduler, Scheduler)
    assert isinstance(kv, KVCache)
    assert isinstance(executor, Executor)
    attention = pick("attention", config.attention) if executor.uses_attention else None
    check_capabilities([plugin for _, plugin in chosen])

    executor.use(
        model=config.model, attention=attention if isinstance(attention, Attention) else None, seed=config.seed
    )
    model = executor.load()
    limits = size_limits(config, model, executor)
    executor.allocate(limits.num_pages, limits.page_size)
    overlap = config.overlap and executor.overlaps
    if overlap != config.overlap:
        log.warning("executor %s cannot overlap: steps are planned and computed in turns", executor.name)
    return core(
        limits=limits,
        model=model,
        scheduler=scheduler,
        kv=kv,
        executor=executor,
        policies=[policy for policy in policies if isinstance(policy, Policy)],
        connectors=[connector for connector in connectors if isinstance(connector, Connector)],
        overlap=overlap,
        audit_every_step=config.audit,
        description={**_describe(chosen, model, limits), "loop": "overlap" if overlap else "sync"},
    )


def size_limits(config: EngineConfig, model: ModelInfo, executor: Executor) -> Limits:
    """The limits in force. Raises ``ConfigError`` where the configuration asks for more than the model can."""
    length = config.max_model_len or model.max_model_len
    if length > model.max_model_len:
        raise ConfigError(f"max_model_len {length} is above the model's own {model.max_model_len}")
    pages = config.num_pages or executor.default_pages(config.page_size)
    if pages is None:
        bytes_per_page = model.kv_bytes_per_token * config.page_size
        if not bytes_per_page:
            pages = DEFAULT_PAGES_WITHOUT_KV
        elif not (pages := parse_bytes(config.kv_memory) // bytes_per_page):
            raise ConfigError(f"kv_memory {config.kv_memory} does not hold one page of {bytes_per_page} bytes")
    if pages * config.page_size < 2:
        raise ConfigError(
            f"the pool is too small for one request: num_pages {pages} x page_size {config.page_size} holds "
            f"{pages * config.page_size} token; at least 2 are needed"
        )
    return Limits(
        max_model_len=length,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        page_size=config.page_size,
        num_pages=pages,
        vocab_size=model.vocab_size,
        max_waiting=config.max_waiting,
    )


def _describe(chosen: Sequence[tuple[Found, Plugin]], model: ModelInfo, limits: Limits) -> dict[str, Any]:
    plugins = [
        {
            "role": found.role,
            "name": plugin.name,
            "distribution": found.distribution,
            "version": found.version,
            "options": plugin.options.model_dump(mode="json"),
        }
        for found, plugin in chosen
    ]
    return {
        "model": {"name": model.name, "fingerprint": model.fingerprint, **model.details},
        "plugins": plugins,
        "limits": {
            name: getattr(limits, name)
            for name in ("max_model_len", "max_batch_tokens", "max_running", "page_size", "num_pages", "max_waiting")
        },
    }
