"""An engine core around a model whose every token is chosen, plugins by name or as instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.core.cache_events import CacheLog
from engine.core.containment import ASK_SECONDS
from engine.core.grammar import Vocabulary
from engine.core.loop import EngineCore
from engine.core.protocols import (
    Connector,
    Executor,
    GrammarCompiler,
    KVCache,
    Limits,
    ModelInfo,
    Plugin,
    Policy,
    Scheduler,
)
from engine.core.record.desk import RecordOptions
from engine.core.registry import make
from engine.testing.executors import ScriptedModel, ShadowExecutor


def make_core(
    *,
    scheduler: str | Scheduler = "unified",
    kvcache: str | KVCache = "paged",
    executor: Executor | None = None,
    policies: Sequence[Policy | str] = (),
    connectors: Sequence[Connector] = (),
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int | None = None,
    max_batch_tokens: int = 64,
    max_running: int = 8,
    max_waiting: int = 1000,
    limits: Mapping[str, Any] | None = None,
    audit: bool = True,
    overlap: bool = False,
    ask_seconds: float | Mapping[str, float] = ASK_SECONDS,
    core: type[EngineCore] = EngineCore,
    scheduler_options: Mapping[str, Any] | None = None,
    kvcache_options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    cache_log: CacheLog | None = None,
    grammar: str | GrammarCompiler | None = None,
    vocabulary: Vocabulary | Callable[[ModelInfo], Vocabulary] | None = None,
    grammar_seconds: float = 60.0,
    record: RecordOptions | None = None,
) -> EngineCore:
    """An engine core around a scripted model, audited after every step. Plugins by name or as instances.

    ``limits``: other fields of ``Limits``, e.g. ``{"queue_timeout": 1.0}``. ``grammar``: a compiler, told of
    the ``vocabulary``, which may depend on the model.
    """
    executor = executor or ScriptedModel()
    model = executor.load()
    compiler = None if grammar is None else _plugin("grammar", grammar)
    assert compiler is None or isinstance(compiler, GrammarCompiler)
    bounds = Limits(
        max_model_len=min(max_model_len or model.max_model_len, model.max_model_len),
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        page_size=page_size,
        num_pages=num_pages,
        vocab_size=model.vocab_size,
        max_waiting=max_waiting,
        sampling=executor.sampling,
        pooling=executor.pooling if model.hidden_size else (),
        grammars=() if compiler is None else compiler.kinds,
        **(limits or {}),
    )
    executor.allocate(num_pages, page_size)
    chosen_scheduler = _plugin("scheduler", scheduler, scheduler_options)
    chosen_kv = _plugin("kvcache", kvcache, kvcache_options)
    chosen_policies = [_plugin("policy", policy) for policy in policies]
    if isinstance(executor, ShadowExecutor):
        chosen_policies.append(executor.witness)
    assert isinstance(chosen_scheduler, Scheduler)
    assert isinstance(chosen_kv, KVCache)
    return core(
        limits=bounds,
        model=model,
        scheduler=chosen_scheduler,
        kv=chosen_kv,
        executor=executor,
        policies=[policy for policy in chosen_policies if isinstance(policy, Policy)],
        connectors=connectors,
        audit_every_step=audit,
        overlap=overlap,
        ask_seconds=ask_seconds,
        clock=clock,
        cache_log=cache_log,
        grammar=compiler,
        vocabulary=(lambda: vocabulary(model) if callable(vocabulary) else vocabulary) if vocabulary else None,
        grammar_seconds=grammar_seconds,
        record=record,
    )


def _plugin(role: str, chosen: str | Plugin, options: Mapping[str, Any] | None = None) -> Plugin:
    return make(role, chosen, options) if isinstance(chosen, str) else chosen
