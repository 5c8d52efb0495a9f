"""KV caches: which pages hold what, and who may find it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool, KVNumbers
from engine.core.protocols.plugin import Plugin
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.cache_watch import CacheWatcher

PublishWhen = Literal["planned", "committed", "prefilled"]


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
