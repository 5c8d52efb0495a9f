"""A KV cache on the bench: a pool, requests made by hand, and the books kept beside it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.identity import namespace_digest
from engine.core.pages import PagePool
from engine.core.plan import KVNumbers
from engine.core.protocols import Context, KVCache, Limits, Match, ModelInfo
from engine.core.request import Request, SamplingParams, State
from engine.testing.guard import Violation

VOCAB = 1000


class CacheBench:
    """Does by hand what the core does with a cache, and looks at the numbers after everything.

    Attributes:
        pool: the page pool.
        running: requests that hold pages.
    """

    def __init__(self, cache: KVCache, *, num_pages: int = 32, page_size: int = 4) -> None:
        self.cache = cache
        self.size = page_size
        self.pool = PagePool(num_pages, page_size)
        self.running: list[Request] = []
        self._made = 0
        limits = Limits(
            max_model_len=num_pages * page_size, max_batch_tokens=1024, max_running=64, page_size=page_size,
            num_pages=num_pages, vocab_size=VOCAB,
        )  # fmt: skip
        model = ModelInfo(name="bench", vocab_size=VOCAB, max_model_len=limits.max_model_len)
        cache.start(Context(limits=limits, pool=self.pool, model=model))
        self.look()

    def request(self, tokens: Sequence[int], *, salt: str = "", adapter: str = "") -> Request:
        """A request that waits."""
        self._made += 1
        return Request(
            id=f"b{self._made}",
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=SamplingParams(),
            max_total=10_000,
            namespace=namespace_digest("bench", adapter, salt),
            adapter=adapter,
            arrival_index=self._made,
        )

    def match(self, request: Request) -> Match:
        """Look up; check what every look-up must be: whole pages, never the last token, nothing pinned."""
        before = self.cache.numbers()
        match = self.cache.match(request)
        if match.tokens % self.size:
            raise Violation(f"match found {match.tokens} tokens, which is no number of whole pages of {self.size}")
        if match.tokens > request.num_tokens - 1:
            raise Violation(
                f"match found {match.tokens} of {request.num_tokens} tokens: the last is never matched, "
                "since its logits must be computed"
            )
        if self.cache.numbers() != before:
            raise Violation(f"match changed the numbers from {before} to {self.cache.numbers()}: it pins nothing")
        return match

    def hold(self, request: Request) -> Match:
        """Start a request: match, adopt, take what is missing."""
        match = self.match(request)
        before = self.cache.numbers()
        pages = self.cache.adopt(request, match)
        request.pages = list(pages)
        self.running.append(request)
        request.state = State.RUNNING
        request.prefill_target = request.num_tokens
        if len(pages) * self.size != match.tokens:
            raise Violation(f"adopt gave {len(pages)} pages of {self.size} for a match of {match.tokens} tokens")
        taken = before.evictable - self.look().evictable
        if taken != match.idle:
            raise Violation(f"match promised that pinning takes {match.idle} evictable pages, and it took {taken}")
        request.pages.extend(self.cache.take(request, -(-request.num_tokens // self.size) - len(pages)))
        request.computed = request.planned = request.num_tokens
        self.look()
        return match

    def publish(self, request: Request, upto: int | None = None) -> Sequence[object]:
        """Publish what is computed; follow a swap of pages. Returns the keys."""
        publication = self.cache.publish(request, request.computed if upto is None else upto)
        if publication.pages is not None:
            if len(publication.pages) != len(request.pages):
                raise Violation(f"publish swapped {len(request.pages)} pages for {len(publication.pages)}")
            request.pages = list(publication.pages)
        self.look()
        return publication.keys

    def release(self, request: Request, keep: int = 0) -> None:
        """Let go of everything."""
        self.cache.release(request, keep)
        self.running.remove(request)
        request.pages = []
        request.state = State.FINISHED
        self.look()

    def remember(self, tokens: Sequence[int], **fields: str) -> list[int]:
        """Compute, publish and let go of a request's content; returns the pages it was in."""
        request = self.request(tokens, **fields)
        self.hold(request)
        self.publish(request)
        pages = list(request.pages)
        self.release(request, keep=request.num_tokens)
        return pages

    def found(self, tokens: Sequence[int], **fields: str) -> int:
        """Tokens that a newcomer with this prompt would not compute."""
        return self.match(self.request(tokens, **fields)).tokens

    def look(self) -> KVNumbers:
        """The numbers, after checking that they add up and that pages in use are in the cache's hands."""
        numbers = self.cache.numbers()
        used = {page for request in self.running for page in request.pages}
        if not used <= self.pool.held:
            raise Violation(f"pages in use were given back to the pool: {sorted(used - self.pool.held)[:8]}")
        if numbers.total != self.pool.num_pages or numbers.free + numbers.evictable + numbers.pinned != numbers.total:
            raise Violation(f"the numbers do not add up: {numbers} of {self.pool.num_pages} pages")
        if numbers.free != self.pool.num_free:
            raise Violation(f"{self.pool.num_free} pages are free, and the cache counts {numbers.free}")
        if numbers.pinned != len(used):
            raise Violation(f"{len(used)} pages are in use, and the cache counts {numbers.pinned} as pinned")
        self.pool.check()
        self.cache.check(self.running)
        return numbers
