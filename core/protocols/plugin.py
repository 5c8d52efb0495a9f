"""Every plugin: how it is made, what it may know of the engine, and how it begins and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from engine.core.pages import PagePool
from engine.core.values import from_text


class PluginOptions(BaseModel):
    """Base of every plugin's options: typed, documented fields; unknown keys are errors, values do not change.

    Text becomes what the field's type says, since flags and variables have nothing else: ``none``, ``a,b``, ``a=1,b=2``
    (``engine.core.values.from_text``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        return from_text(value, field.annotation) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the executor says of the model it serves. ``fingerprint`` digests all that shapes KV bytes; ``hidden_size``
    is how many numbers a hidden state has, 0 where they cannot be had."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_ids: frozenset[int] = frozenset()
    hidden_size: int = 0
    fingerprint: str = ""
    kv_bytes_per_token: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that every request and every step obeys, whatever the plugins.

    Args:
        max_model_len: most tokens (prompt and output) of one request.
        max_batch_tokens: most tokens that one step computes.
        max_running: most requests that hold pages at once.
        page_size: tokens a page.
        num_pages: pages in the pool.
        vocab_size: token ids are below this.
        max_waiting: most requests in the queue.
        max_waiting_tokens: most prompt tokens of requests in the queue that have not begun. One request alone may have
            more.
        queue_timeout: seconds that a request waits to begin before it ends; ``None``: as long as it takes.
        max_n: most choices of one prompt.
        max_logprobs: most rivals of a token whose log-probabilities are reported.
        max_prompt_logprobs: most log-probabilities reported of one prompt.
        max_output_logprobs: most that the outputs of requests submitted as one may come to.
        max_stop_strings, max_stop_length: most stop strings of a request, most characters of one.
        max_stop_token_ids, max_logit_bias: most entries.
        max_grammar_bytes: longest grammar.
        sampling: what the executor acts on of ``engine.core.sampling.SAMPLING``.
        pooling: which vectors can be asked for, of ``engine.core.pooling.POOLING``.
        grammars: kinds of grammar that can be asked for.
        no_grammars: why there are none, where there are none.
    """

    max_model_len: int
    max_batch_tokens: int
    max_running: int
    page_size: int
    num_pages: int
    vocab_size: int
    max_waiting: int = 100_000
    max_waiting_tokens: int = 2**62
    queue_timeout: float | None = None
    max_n: int = 128
    max_logprobs: int = 20
    max_prompt_logprobs: int = 65_536
    max_output_logprobs: int = 2**20
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024
    max_grammar_bytes: int = 65_536
    sampling: tuple[str, ...] = ()
    pooling: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    no_grammars: str = "no grammar compiler was selected"

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits in the whole pool."""
        return self.num_pages * self.page_size

    @property
    def max_open(self) -> int:
        """Most requests that can be open at once: running and in the queue."""
        return self.max_running + self.max_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a plugin is given at ``start``.

    ``clock`` is the engine's, in seconds: on it requests arrive and are due. It stands still while a step is planned
    and while one is committed. Plugins that decide by time read it alone, so that a decision can be made anew.
    """

    limits: Limits
    pool: PagePool
    model: ModelInfo
    clock: Callable[[], float] = time.monotonic


class Plugin:
    """Base of all plugins.

    Class attributes:
        name: how configuration selects it; unique within its role.
        aliases: other names for it.
        requires_api: contract versions it was written for, as ``">=1.0,<2"``.
        provides: capabilities that it offers to others, e.g. ``prefix-cache``.
        requires: capabilities that some other selected plugin must provide; checked before anything starts.
        Options: a ``PluginOptions`` subclass.

    ``origin`` is the distribution that it came from: the registry sets it, errors and logs name it.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    requires_api: ClassVar[str] = ">=1.0,<2"
    provides: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    Options: ClassVar[type[PluginOptions]] = PluginOptions
    origin: str = "local code"

    def __init__(self, options: Any = None) -> None:
        self.options: Any = options if options is not None else self.Options()

    def start(self, context: Context) -> None:
        """Called once before the first step. Raise ``ConfigError`` where limits and options contradict each other."""

    def weights_changed(self, model: ModelInfo) -> None:
        """The model has other weights and another fingerprint from now on; nothing runs and nothing is cached."""

    def close(self) -> None:
        """Give back everything (memory, files, threads). Called once, also where ``start`` never was; the last call."""


class Policy(Plugin):
    """A small plugin that answers one hook or two. Contained: if it raises or answers nonsense, the default answers."""
