"""From a configuration to a running engine core: select, check, load, size the pool, wire."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from engine.core.capabilities import Report, label, report
from engine.core.config import EngineConfig, Selection, parse_bytes
from engine.core.errors import ConfigError, ModelError
from engine.core.grammar import Vocabulary, vocabulary_of
from engine.core.handoff import check_role, with_role
from engine.core.loop import EngineCore
from engine.core.protocols import (
    ROLES,
    Attention,
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
from engine.core.registry import Found, Registry, build
from engine.core.values import hidden

if TYPE_CHECKING:
    from engine.core.cache_feed import CacheFeed

log = logging.getLogger(__name__)

DEFAULT_PAGES_WITHOUT_KV = 4096
DEFAULT_BATCH_TOKENS = 2048
REQUEST_LIMITS = (
    "max_waiting", "max_waiting_tokens", "queue_timeout", "max_n", "max_logprobs", "max_prompt_logprobs",
    "max_output_logprobs", "max_stop_strings", "max_stop_length", "max_stop_token_ids", "max_logit_bias",
    "max_grammar_bytes",
)  # fmt: skip

P = TypeVar("P", bound=Plugin)


def assemble(
    config: EngineConfig,
    registry: Registry | None = None,
    *,
    core: type[EngineCore] = EngineCore,
    directory: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> EngineCore:
    """Build an engine core. Everything is selected and checked before the model is loaded.

    Where it cannot be built, every plugin that was made is closed again.

    Args:
        core: the class to build, e.g. one that records what it decides.
        directory: where private sockets lie, if there are any (default: a new one, removed at the end).
        clock, sleep: the engine's time, where it is not the machine's: see ``EngineCore``.

    Raises:
        ConfigError: limits or options that contradict each other.
        PluginError: a selected plugin is unknown, broken or incompatible, or could not start.
        ModelError: the model cannot be found or read.
    """
    choice = Choice(config, registry or Registry())
    feed = None
    try:
        choice.pick()
        feed = _feed(config, directory)
        return _build(config, choice, partial(core, clock=clock, sleep=sleep), feed)
    except BaseException:
        choice.close()
        if feed is not None:
            feed.close()
        raise


def _feed(config: EngineConfig, directory: str | None) -> CacheFeed | None:
    if config.cache_events == "off":
        return None
    from engine.core.cache_feed import feed_of

    return feed_of(config, directory)


class Choice:
    """The plugins that a configuration selects, made and checked, and not started."""

    def __init__(self, config: EngineConfig, registry: Registry) -> None:
        self._config, self._registry = config, registry
        self.chosen: list[tuple[Found, Plugin]] = []
        self.attention: Attention | None = None
        self.no_grammars: str | None = None
        self._adopted = False  # the executor starts and closes its attention backend once it was told of it

    def pick(self) -> None:
        """Make them all. Raises ``ConfigError`` and ``PluginError``; what was made by then is in ``chosen``."""
        config = self._config
        self._pick("scheduler", config.scheduler)
        self._pick("kvcache", config.kvcache)
        for selection in config.policies:
            self._pick("policy", selection)
        for selection in config.connectors:
            self._pick("connector", selection)
        check_role(config.role, map(type, self.of(Connector)), self._registry)
        self._pick("grammar", config.grammar)
        self.no_grammars = self._missing_for_grammars()
        self._pick("executor", config.executor)  # late: importing one may take seconds, a misspelt name should not
        if self.executor.uses_attention:
            self._pick("attention", config.attention)
            self.attention = self._only(Attention)
        self.report().raise_if_not_ok()

    def _pick(self, role: str, selection: Selection) -> None:
        found = self._registry.select(role, selection.name)
        if role == "connector":
            selection = with_role(selection, found.cls, self._config.role)
        self.chosen.append((found, build(found, selection)))

    def of(self, role: Callable[..., P]) -> list[P]:
        """Those of a role, as configured."""
        return [cast(P, plugin) for found, plugin in self.chosen if ROLES[found.role] is role]

    def _only(self, role: Callable[..., P]) -> P:
        return self.of(role)[0]

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler."""
        return self._only(Scheduler)

    @property
    def kv(self) -> KVCache:
        """The KV cache."""
        return self._only(KVCache)

    @property
    def grammar(self) -> GrammarCompiler:
        """What compiles grammars."""
        return self._only(GrammarCompiler)

    def _missing_for_grammars(self) -> str | None:
        """Why there are no grammars, where they were not asked for. Raises ``ConfigError`` where they were."""
        chosen = self._config.grammar
        why = self.grammar.missing()
        if why is not None and chosen != EngineConfig.model_fields["grammar"].default:
            raise ConfigError(f"grammar {chosen.name!r} cannot be used: {why}")
        return why

    @property
    def executor(self) -> Executor:
        """The executor."""
        return self._only(Executor)

    def load(self) -> ModelInfo:
        """Tell the executor what was chosen for it, and let it load the model. Raises ``ModelError``."""
        self._adopted = True
        self.executor.use(model=self._config.model, attention=self.attention, seed=self._config.seed)
        return self.executor.load()

    def report(self) -> Report:
        """Who provides what, what is missing, and what is less than was asked for."""
        downgrades = []
        executors = self.of(Executor)
        if self._config.overlap and executors and not executors[0].overlaps:
            downgrades.append(f"executor {executors[0].name} cannot overlap: steps are planned and computed in turns")
        if self.no_grammars is not None:
            downgrades.append(f"requests with a grammar are refused: {self.no_grammars}")
        notes = [f"{found.role} {plugin.name!r}: {note}" for found, plugin in self.chosen for note in found.notes]
        return report([plugin for _, plugin in self.chosen], self._registry, downgrades=downgrades, notes=notes)

    def close(self) -> None:
        """Close them all, the last made first; what one raises is logged and keeps no other from closing."""
        for _, plugin in reversed(self.chosen):
            if plugin is self.attention and self._adopted:
                continue
            try:
                plugin.close()
            except Exception:
                log.exception("%s of %s could not be closed", label(plugin), plugin.origin)
        self.chosen = []


def _build(config: EngineConfig, choice: Choice, core: Callable[..., EngineCore], feed: CacheFeed | None) -> EngineCore:
    executor = choice.executor
    model = choice.load()
    limits = size_limits(config, model, executor)
    limits = replace(limits, **_grammars(choice))
    executor.allocate(limits.num_pages, limits.page_size)
    overlap = config.overlap and executor.overlaps
    built = core(
        limits=limits,
        model=model,
        scheduler=choice.scheduler,
        kv=choice.kv,
        executor=executor,
        policies=choice.of(Policy),
        connectors=choice.of(Connector),
        overlap=overlap,
        audit_every_step=config.audit,
        ask_seconds=config.ask_seconds,
        cache_feed=feed,
        grammar=choice.grammar,
        vocabulary=lambda: _vocabulary(config, model),
        grammar_seconds=config.grammar_seconds,
        grammar_threads=config.grammar_threads,
        record=RecordOptions.of(config),
        description={
            **_describe(choice.chosen, model, limits),
            "loop": "overlap" if overlap else "sync",
        },
    )
    summary = choice.report()  # after the start: what a plugin cannot do with these limits it knows only now
    log.info("%s", summary.text())
    for words in summary.downgrades:
        log.warning("%s", words)
    built.describe_also(report=summary.plain())
    return built


def _grammars(choice: Choice) -> dict[str, Any]:
    """What ``Limits`` says of grammars."""
    if choice.no_grammars is not None:
        return {"no_grammars": choice.no_grammars}
    return {"grammars": tuple(choice.grammar.kinds), "no_grammars": ""}


def _vocabulary(config: EngineConfig, model: ModelInfo) -> Vocabulary:
    """The served model's vocabulary, for grammars. Raises ``ModelError`` where it has no tokenizer."""
    from engine.core.serve.text import find_tokenizer

    tokenizer = find_tokenizer(config)
    if tokenizer is None:
        raise ModelError("the served model has no tokenizer")
    return vocabulary_of(tokenizer, model)


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
        max_batch_tokens=config.max_batch_tokens or executor.default_batch_tokens() or DEFAULT_BATCH_TOKENS,
        max_running=config.max_running,
        page_size=config.page_size,
        num_pages=pages,
        vocab_size=model.vocab_size,
        sampling=executor.sampling,
        pooling=executor.pooling if model.hidden_size else (),
        **{name: getattr(config, name) for name in REQUEST_LIMITS},
    )


def _describe(chosen: Sequence[tuple[Found, Plugin]], model: ModelInfo, limits: Limits) -> dict[str, Any]:
    plugins = [
        {
            "role": found.role,
            "name": plugin.name,
            "distribution": found.distribution,
            "version": found.version,
            "options": {name: hidden(name, value) for name, value in plugin.options.model_dump(mode="json").items()},
        }
        for found, plugin in chosen
    ]
    return {
        "model": {"name": model.name, "fingerprint": model.fingerprint, **model.details},
        "plugins": plugins,
        "limits": {
            name: getattr(limits, name)
            for name in ("max_model_len", "max_batch_tokens", "max_running", "page_size", "num_pages", *REQUEST_LIMITS)
        },
    }
