"""The roles that plugins play, as base classes: plain methods for what the core drives, hooks for what it asks.

A plugin is a class with a ``name``, an ``Options`` model, what it ``provides`` and ``requires``. The registry builds it
with its validated options; the core then calls ``start`` once, in the order executor, KV cache, scheduler, policies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from engine.core.batch import AttentionLayer, Batch
from engine.core.errors import ConfigError
from engine.core.grammar import Grammar, Vocabulary, Words
from engine.core.hookspecs import hookimpl
from engine.core.pages import PagePool
from engine.core.plan import Candidate, EvictionPool, KVNumbers, Outcome, Plan
from engine.core.request import Request
from engine.core.tools import Heard, Tool, ToolCall
from engine.core.values import from_text

if TYPE_CHECKING:
    from engine.core.cache_watch import CacheWatcher
    from engine.core.keys import Keys
    from engine.core.memory import KVLayout
    from engine.core.step import Step

PublishWhen = Literal["planned", "committed", "prefilled"]


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


class Connector(Plugin):
    """Moves KV between engines and tiers: answers ``transfer_kv``, at once: the work is done in threads of its own.

    Class attributes:
        loads: it may have content to give: ``probe`` and ``pull`` transfers are for it.
        saves: it keeps content: ``push`` transfers are for it.
        patience: seconds from a request's arrival for which it may be kept waiting for what comes in.
        min_tokens: fewer than so many tokens more than are cached here are not worth a transfer.
        saving_share: at most this part of the pool is fenced for what it saves; what is beyond is not handed to it.
        holds: what a probe finds is held for it elsewhere, so a ``cancel`` of the probe tells when it is not wanted.
        notice: what a store calls, from any thread, with the keys that it keeps from now on or no longer keeps;
            ``None`` where nobody listens. Set by the core, before ``register``.
    """

    loads: bool = False
    saves: bool = False
    patience: float = 5.0
    min_tokens: int = 0
    saving_share: float = 0.25
    holds: bool = False
    notice: Callable[[Literal["stored", "removed"], Sequence[bytes]], None] | None = None

    def register(self, layout: KVLayout) -> None:
        """Where KV memory lies. Called once, after ``start``, of a connector that loads or saves.

        The memory stays where it is until ``close``. Raise ``ConfigError`` where it cannot be worked with.
        """

    def compose(self, others: Sequence[Connector]) -> Sequence[Connector]:
        """Those of the other selected connectors that it drives itself: it starts and closes them, and the core knows
        them no more. Called once, first of all. None by default. Raise ``ConfigError`` where they do not fit."""
        return ()

    def describe(self) -> Mapping[str, Any]:
        """What others must know of it, e.g. where it listens: part of ``EngineCore.describe``. Called after
        ``register``. Nothing by default."""
        return {}

    def stats(self) -> Mapping[str, int | float]:
        """Numbers of its own, for whoever watches: ``EngineCore.stats`` names them ``connector_NAME_…``. None by
        default."""
        return {}

    def clear(self) -> int:
        """Forget all that it keeps; returns the number of pages. Called on the engine's thread: at once.

        Raises:
            ConfigError: it keeps nothing that could be forgotten, or what others use, too (the default).
        """
        raise ConfigError(f"connector {self.name} has nothing that can be cleared from here")


class Scheduler(Plugin, ABC):
    """Answers ``plan``, by default also ``order``, ``admit`` and ``evict`` of kind ``running``. No KV arithmetic."""

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """The ``plan`` hook (decorate the implementation with ``hookimpl``)."""

    def queue_key(self) -> Callable[[Request], Any] | None:
        """The key by which the waiting queue is kept sorted at all times; ``None``: by arrival, victims as pushed.

        Asked once, after ``start``. For orders that do not change while a request waits; others answer ``order``.
        """
        return None

    def displace(self, waiting: Iterable[Request], priority: int) -> Request | None:
        """The queue is full: which request is to be aborted for a newcomer of this priority; ``None``: refuse it."""
        return None

    def stats(self) -> Mapping[str, int | float]:
        """Numbers of its own, for whoever watches: ``EngineCore.stats`` names them ``scheduler_…``. None by default."""
        return {}

    def on_idle(self) -> None:
        """Nothing is left to do: the next request comes to an empty engine."""

    def on_preempt(self, request: Request) -> None:
        """The request gave up its pages and is about to be queued again; forget it among those that run."""

    def on_end(self, request: Request) -> None:
        """The request ended outside a commit (aborted, failed, rejected); forget it. Idempotent."""


class Match(NamedTuple):
    """What the prefix cache has of a request. Valid until the cache changes: adopt it in the same breath.

    ``tokens`` is page-aligned and at most ``num_tokens - 1``; ``idle`` of its pages are evictable now (pinning them
    makes the pool poorer); ``pages`` and ``handle`` belong to the cache (``adopt`` says which pages they are).
    """

    tokens: int
    pages: tuple[int, ...] | list[int]
    idle: int
    handle: Any = None


class PrefixNode(Protocol):
    """A node of a cache that keeps its prefixes in a tree, as far as others may look at it."""

    @property
    def parent(self) -> PrefixNode | None:
        """``None`` above the root."""

    @property
    def children(self) -> Mapping[Any, PrefixNode]:
        """The children, oldest first."""


class Outlined(NamedTuple):
    """A node of a cache's tree as a viewer is shown it: how much, never what.

    ``parent`` is its parent's place in the outline, -1 right below the root. ``tokens`` and ``pages`` are its own;
    ``users`` requests use it now; ``children`` is how many it has, whether they are shown or not; ``used`` grows with
    use.
    """

    parent: int
    tokens: int
    pages: int
    users: int
    children: int
    used: int


class KVCache(Plugin, ABC):
    """Keeps the index of cached content and the books of who holds which page. Plain methods, driven by the core.

    Who owns a page: the pool hands pages to the cache (``held``); the cache knows each as *private* to one request,
    *shared* (published, in use by one or more) or *idle* (published, used by nobody: evictable).

    Class attribute ``publish_when`` says when the core calls ``publish``: as soon as a page's last token is
    ``planned`` (vLLM: twins in one step share), when it is ``committed``, or ``prefilled``: a prompt when it is
    complete (the part of one in progress when its next chunk is planned), the rest at the end (SGLang).
    """

    publish_when: ClassVar[PublishWhen] = "committed"
    keeps_time: ClassVar[bool] = False  # whether it acts on ``Request.cache_ttl``; else requests with one are refused
    caching: bool = True  # False where it was told to remember nothing

    @abstractmethod
    def match(self, request: Request) -> Match:
        """Longest cached prefix, whole pages, at most ``num_tokens - 1`` tokens.

        Mutates recency and tree shape at most; never pins or frees.
        """

    def probe(self, request: Request) -> Match:
        """What is cached of all the request's tokens, the last included: to order by, not to adopt.

        The handle of a cache that keeps a tree is a ``PrefixNode``. Mutates as ``match`` does. Default: ``match``.
        """
        return self.match(request)

    @abstractmethod
    def adopt(self, request: Request, match: Match) -> list[int]:
        """Pin a fresh match for the request and return its pages, first page first. Mutates.

        The list becomes the request's page table: it must be a new one.
        """

    @abstractmethod
    def take(self, request: Request, count: int) -> list[int]:
        """Give the request ``count`` private pages off the pool. Mutates. Raises ``OutOfPages``, taking none."""

    def take_each(self, requests: Sequence[Request]) -> list[int]:
        """One private page for each of them, in order. Mutates. Raises ``OutOfPages``, having taken some or none."""
        return [page for request in requests for page in self.take(request, 1)]

    @abstractmethod
    def publish(self, request: Request, upto: int) -> Publication:
        """Make the request's first ``upto`` tokens (whole pages of them) matchable. Mutates. Idempotent.

        May find that the same content exists already and swap pages: the answer then carries the new page table.
        """

    @abstractmethod
    def unpublish(self, keys: Sequence[object]) -> None:
        """Take back what a failed step had published: these keys never match again. Mutates. Unknown keys are fine."""

    @abstractmethod
    def release(self, request: Request, keep: int) -> None:
        """The request lets go of all its pages; the content of its first ``keep`` tokens may stay cached. Mutates.

        What the last step of a request computed was not published, unless when it was planned: publish it here, first,
        if it is to be found again. Harmless where the request holds nothing. ``keep`` is 0 when its pages are needed at
        once.
        """

    @abstractmethod
    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Evict idle content by key, in order; keys that are unknown or in use are skipped. Mutates.

        Stops once ``need`` pages became free (``None``: goes through all keys). Returns how many became free.
        """

    @abstractmethod
    def victims(self, need: int) -> Sequence[object]:
        """The default eviction: keys whose dropping frees at least ``need`` pages, if there are. Does not mutate."""

    @abstractmethod
    def candidates(self) -> Sequence[Candidate]:
        """All idle content that ``drop`` would accept now, in the default's order. Does not mutate."""

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> Sequence[object] | None:
        """Default answer of the ``evict`` hook for cached pages."""
        return self.victims(need) if pool.kind == "cache" else None

    @abstractmethod
    def numbers(self) -> KVNumbers:
        """Counts of free, evictable and pinned pages. ``evictable`` is what could really be freed. Does not mutate."""

    def available(self) -> int:
        """Pages that a grant could take now: free and evictable ones. Does not mutate. Asked often: override it."""
        return self.numbers().available

    @abstractmethod
    def reset(self) -> None:
        """Forget all idle content. Mutates. Content in use is forgotten when its users let go."""

    def expire(self, now: float) -> None:
        """It is ``now``, in seconds on the engine's clock, until the next call: content whose time is over is not found
        any more, and what is idle of it returns to the pool. Mutates. Who uses pages keeps them.

        Called between two steps, at the beginning of each once any request had a ``cache_ttl``. A page's time is over
        ``cache_ttl`` seconds after the last request with one wrote it, or behind it, or adopted it (the greatest such
        time counts); never, once a request without one did (unless it writes nothing: ``write_cache``).
        """

    @abstractmethod
    def check(self, requests: Iterable[Request]) -> None:
        """Full audit against the pool and the requests that hold pages. Does not mutate.

        Raises ``InvariantViolation`` with what differs.
        """

    def watch(self, watcher: CacheWatcher) -> bool:
        """Tell this one of every page that can be matched from now on, and of every one that no longer can, at once.

        Called at most once, after ``start``, and only where somebody wants to know. False where this cache does not
        tell (the default).
        """
        return False

    def contents(self) -> dict[int, bytes] | None:
        """The key (``core.identity.page_digests``) of each page that can be matched. Does not mutate.

        For comparison with what was told. ``None`` where this cache cannot say (the default).
        """
        return None

    def peek(self, namespace: bytes, packed: bytes) -> int | None:
        """How many whole pages of packed tokens are cached, from the first on. Changes nothing, not even recency.

        ``None`` where this cache cannot say (the default).
        """
        return None

    def outline(self, most: int) -> Sequence[Outlined] | None:
        """At most so many nodes of the tree that cached content is kept in, parents first, for people to look at.

        Does not mutate. Costs time in proportion to ``most``, not to the tree. ``None`` where there is no tree (the
        default).
        """
        return None

    def short(self, request: Request, upto: int) -> int:
        """Pages missing for the request to hold ``upto`` tokens. Does not mutate."""
        size = self._page_size
        return max(0, -(-upto // size) - len(request.pages))

    _page_size: int = 1


class Publication(NamedTuple):
    """What ``publish`` did: keys newly matchable (to take back if the step fails) and, if swapped, the new pages."""

    keys: tuple[object, ...] | list[object] = ()
    pages: list[int] | None = None


class Executor(Plugin, ABC):
    """Runs plans on a model. Plans are executed in order; row i's page table is ``plan.tables[i]``.

    Class attributes:
        uses_attention: an attention backend must be selected for it.
        overlaps: ``launch`` may be called in a thread of its own, with plans that were made before the outcome of the
            one before was known (``Plan.awaits``). Without it the engine plans and executes in turns.
        threaded: where it overlaps, ``launch`` is called in that thread. False for one whose ``launch`` takes no time.
        sampling: which of ``engine.core.sampling.SAMPLING`` it acts on. Requests that use another are refused by name.
        pooling: which of ``engine.core.pooling.POOLING`` it computes (``Outcome.pooled``), of models for which it says
            a ``ModelInfo.hidden_size``. Requests for another vector are refused.
    """

    uses_attention: ClassVar[bool] = False
    overlaps: ClassVar[bool] = False
    threaded: ClassVar[bool] = True
    sampling: ClassVar[tuple[str, ...]] = ()
    pooling: ClassVar[tuple[str, ...]] = ()

    def use(self, *, model: str, attention: Attention | None, seed: int) -> None:
        """What the configuration chose: told once, before ``load``. Default: ignored."""

    @abstractmethod
    def load(self) -> ModelInfo:
        """Read the model. Called once, first. May take seconds and show progress. Raises ``ModelError``."""

    @abstractmethod
    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate KV memory for so many pages. Called once, after ``load``."""

    @abstractmethod
    def execute(self, plan: Plan) -> Outcome:
        """Compute the plan: write KV for every row's tokens, sample where ``plan.samples``. Does not touch requests.

        Raises ``ExecutionError`` (or anything else) when the step as a whole failed; a row that failed alone goes into
        ``outcome.errors``.
        """

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """Begin to compute the plan; what is returned waits until it is computed, and gives its outcome or raises.

        This is what the engine calls, plan after plan. An executor of a device that works on its own returns as soon as
        the device has been told all, so that the next plan can be launched meanwhile. The answer is asked for once, in
        any thread, also while the next plan is being launched. Default: ``execute``, at once.
        """
        outcome = self.execute(plan)
        return lambda: outcome

    def broken(self) -> str | None:
        """Asked after a step failed: ``None`` if later steps may work, else the cause; the engine then stops.

        An executor whose device is lost must say so: as long as it does not, only the failed step's requests end.
        """
        return None

    def weights(self) -> Mapping[str, Any]:
        """A copy of the weights in force, by name: arrays of the executor's own kind. Does not mutate.

        Raises:
            ConfigError: this executor cannot show them (the default).
        """
        raise ConfigError(f"executor {self.name} cannot show its weights")

    def update_weights(self, weights: Any, version: str | None = None) -> str:
        """Replace weights by others of the same shapes; returns the model's new fingerprint. Mutates.

        Called between two steps. All is checked before anything is changed. The new weights are copied: whoever gave
        them may go on changing them.

        Args:
            weights: by name, all or some; or where to read them from, as ``use`` was told.
            version: names the weights, instead of a digest of them all: equal names must mean equal weights.

        Raises:
            ConfigError: this executor cannot change its weights (the default).
            ModelError: they do not fit; nothing was changed.
        """
        raise ConfigError(f"executor {self.name} cannot change its weights")

    def kv_layout(self) -> KVLayout | None:
        """Its KV memory, for connectors; ``None`` where nobody else can reach it. Called after ``allocate``."""
        return None

    def forget(self, request: Request) -> None:
        """The request ended; drop per-request state. Called at most once a request."""

    def default_pages(self, page_size: int) -> int | None:
        """Pages worth allocating when the configuration does not say; ``None`` leaves it to the core's default."""
        return None

    def default_batch_tokens(self) -> int | None:
        """Most tokens of a step when the configuration does not say; ``None`` leaves it to the core's default.

        Streams that run wait for a step as long as its tokens take: slow devices want fewer. Asked after ``load``.
        """
        return None


class Attention(Plugin, ABC):
    """An attention backend over paged KV. Tensors are torch's; the core never looks at them.

    It belongs to the executor that is given it, which starts and closes it: ``prepare``, ``expect``, ``start``, and
    then for each step ``plan_batch`` and, for each layer, ``write`` and ``attend``.

    Layout of one layer's K and of its V: ``[num_pages, page_size, kv_heads, head_dim]``.

    What it ``provides``: ``attention:prefill``, ``attention:decode`` and ``attention:mixed`` (kinds of batches),
    ``attention:window`` and ``attention:soft-cap`` (features of layers), ``attention:fp8-kv`` (pages of type
    ``float8_e4m3fn``, stored with scale 1), ``attention:graphs`` (``plan_graph``), ``attention:cascade`` (it reads
    ``Batch.shared`` pages once).
    """

    def prepare(self, *, device: str, dtype: str) -> str:
        """What K, V and queries will be: told at most once, before ``start``. Returns, in words, what will compute.

        May take seconds, to compile. Default: its name, for everything.

        Args:
            device: where they are, e.g. ``cpu``.
            dtype: their type, e.g. ``float32``.

        Raises:
            ConfigError: it cannot; says why, and what would help.
        """
        return self.name

    def expect(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Every attention layer of the model, in order: told at most once, after ``prepare`` and before ``start``.

        Returns, in words, what will compute, where that is not what ``prepare`` said. Default: nothing is done.

        Raises:
            ConfigError: it cannot compute one of them; says why.
        """
        return None

    @abstractmethod
    def plan_batch(self, batch: Batch) -> None:
        """Prepare for a batch (lengths, page tables): called once a step, before the first layer."""

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan_batch``, for a step whose kernels are, or will be, launched by a CUDA graph: ``attention:graphs``.

        All rows are decodes (``counts`` are 1); their number says which graph. The executor pads a batch with rows of
        one token on a page that nobody owns; those may share it. The first call with so many rows makes the index
        tensors of that graph, for rows of any length; later ones overwrite them in place, in stream order, without
        waiting for the device. What is captured between must hold: ``write`` and ``attend`` launch kernels and nothing
        else, and a graph computes what the latest ``plan_graph`` with its number of rows has told. Graphs are planned
        the largest first, after ``expect`` and ``start``; each is run once without capture before it is captured.

        Raises:
            NotImplementedError: this backend cannot (the default).
        """
        raise NotImplementedError(f"attention {self.name} cannot be captured in graphs")

    def compiled_batch(self) -> Any | None:
        """What ``plan_batch`` has laid out, as ``engine.core.native.PagedBatch``: where ``write`` and ``attend`` do
        nothing but call the compiled kernels ``write`` and ``attend`` with it.

        An executor may then run all layers in one call of those kernels instead. It stays as it is until the next
        ``plan_batch``. Default: ``None``, and ``write`` and ``attend`` are called for each layer.
        """
        return None

    @abstractmethod
    def write(self, keys: Any, values: Any, k_pages: Any, v_pages: Any) -> None:
        """Store the batch's new K and V, each ``[tokens, kv_heads, head_dim]``, into the pages of a layer."""

    @abstractmethod
    def attend(
        self,
        query: Any,
        k_pages: Any,
        v_pages: Any,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Any:
        """Causal attention of ``query [tokens, heads, head_dim]`` over the pages: ``[tokens, heads, v_head_dim]`` back.

        Args:
            scale: what scores are multiplied by.
            window: keys that a query sees at most, itself included. Given only to those who provide
                ``attention:window``, for layers that have one.
            soft_cap: scores become ``soft_cap * tanh(score * scale / soft_cap)``. Given only to those who provide
                ``attention:soft-cap``, for layers that have one.
        """


class Frontend(Plugin, ABC):
    """Serves people: an HTTP server or anything that feeds requests to an engine and streams results."""

    @abstractmethod
    def serve(self, engine: Any, *, host: str, port: int, api_key: str | None = None) -> int:
        """Serve until SIGINT or SIGTERM; ``engine`` is an ``AsyncEngine``. Returns the process's exit code: 0 if the
        engine is well then. Leaves no thread and no socket behind.

        Args:
            port: 0 takes any free one.
            api_key: what clients must send; ``None``: anybody may ask.

        Raises:
            ConfigError: it cannot listen there.
        """

    def guard(self, keys: Keys) -> None:
        """Several keys, or keys with labels: ask for one of them, not ``api_key``. Called before ``serve`` or ``app``.

        The label of a key is the tenant of whoever sends it: ``Ask.tenant``, empty for a key without one.

        Raises:
            ConfigError: this frontend knows one key only (the default).
        """
        raise ConfigError(f"frontend {self.name} knows one key only: give one --api-key, and no --api-key-file")

    def open(self, *, host: str, port: int) -> None:
        """The engine is about to be loaded, which may take minutes. Called at most once, before ``serve``.

        A frontend may listen from now on and say that it is starting. Default: nothing is done.

        Raises:
            ConfigError: it cannot listen there.
        """

    def app(self, engine: Any, *, api_key: str | None = None) -> Any:
        """The same as an ASGI application, for a host that serves it: no socket, no signals, no lifespan of its own.

        Raises:
            ConfigError: this frontend is no ASGI application (the default).
        """
        raise ConfigError(f"frontend {self.name} cannot be mounted in another application")


class Matcher(Protocol):
    """Follows one output through a grammar, token by token."""

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""

    def fill(self, mask: Words) -> None:
        """Set the bits of the tokens that may follow, in a mask of zeros; ends only where it is ``accepting``.

        Raises ``GrammarError`` where that has become too complex to say. Mutates the mask only.
        """

    def accept(self, token: int) -> bool:
        """Go on by a token, which is no end; False, and nothing has changed, where it cannot follow. Mutates."""

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back. Mutates."""


class CompiledGrammar(Protocol):
    """A grammar that is ready. May be shared by any number of requests."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning, which has nothing in common with others. Called where grammars are compiled,
        and may take as long."""


class GrammarCompiler(Plugin, ABC):
    """Turns grammars into masks over the vocabulary.

    Class attribute ``kinds`` says which of ``engine.core.grammar.KINDS`` it takes; others are refused for it.
    """

    kinds: ClassVar[tuple[str, ...]] = ()

    def missing(self) -> str | None:
        """What it needs and is not here, with what would help; ``None`` where all is. Asked first, and must be quick.

        The engine then starts without grammars if nobody selected this one by name, else it does not start.
        """
        return None

    @abstractmethod
    def prepare(self, vocabulary: Vocabulary) -> None:
        """Learn the vocabulary. Called once, before the first ``compile``, in a thread that may take its time."""

    @abstractmethod
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, within bounds: called in threads, several at once, that cannot be stopped.

        Raises:
            InvalidRequest: it is no grammar of its kind, or has what is not supported: refused, and never ignored.
        """


class ToolStream(Protocol):
    """Reads one answer for the calls in it. What it says of the whole does not depend on how the text was cut."""

    def push(self, text: str) -> Heard:
        """More of the answer; returns what is certain now. Mutates."""

    def finish(self) -> Heard:
        """The answer is over; returns what was held back. Mutates."""


class ToolParser(Plugin, ABC):
    """How a model writes calls of tools. Used by frontends, in their process.

    Class attribute ``marks``: texts that stand around calls; where the model has them as special tokens, they are not
    left out of the text.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def stream(self) -> ToolStream:
        """A reader for one answer."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, field: str) -> Grammar:
        """What an answer is that calls some of these tools and says nothing else: for clients that require it.

        Raises ``InvalidRequest`` where a tool cannot be written so.

        Args:
            parallel: several calls, or one.
            field: of the request, for the grammar's own errors.
        """

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system's message says of the tools, for models whose chat template knows nothing of them."""

    @abstractmethod
    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model writes them, for the same."""

    @abstractmethod
    def answered(self, content: str) -> str:
        """What a tool gave back, as the model is told of it, for the same."""


ROLES: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "scheduler": Scheduler,
        "kvcache": KVCache,
        "attention": Attention,
        "connector": Connector,
        "executor": Executor,
        "grammar": GrammarCompiler,
        "frontend": Frontend,
        "policy": Policy,
        "tool_parser": ToolParser,
    }
)
"""Role name -> base class."""

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "scheduler": "engine.schedulers",
        "kvcache": "engine.kvcaches",
        "attention": "engine.attention",
        "connector": "engine.connectors",
        "executor": "engine.executors",
        "grammar": "engine.grammars",
        "frontend": "engine.frontends",
        "policy": "engine.policies",
        "tool_parser": "engine.tool_parsers",
    }
)
"""Role name -> entry-point group."""
