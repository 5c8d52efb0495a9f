"""What a KV cache tells, held against what it has: for caches that can be watched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.identity import first_known, namespace_digest, pack, page_digests
from engine.core.request import Request
from engine.testing.bench import CacheBench
from engine.testing.guard import Violation


class Told:
    """A watcher that keeps what it is told and believes none of it.

    Attributes:
        pages: the key of each page that can be matched, as told.
        watched: whether the cache tells at all.
    """

    def __init__(self, bench: CacheBench) -> None:
        self._bench = bench
        self.pages: dict[int, bytes] = {}
        self.watched = bench.cache.watch(self)

    # ---- told by the cache

    def stored(
        self, request: Request, first: int, pages: Sequence[int], keys: Sequence[bytes], parent: bytes | None
    ) -> None:
        """Pages are told of once, under the digests of the request's own tokens. Raises ``Violation``."""
        size = self._bench.size
        wanted = page_digests(request.namespace, pack(request.tokens), size)
        last = first + len(keys)
        if len(pages) != len(keys) or list(keys) != wanted[first:last]:
            raise Violation(f"pages {first} to {last} of {request.id} are told under keys that are not their content's")
        if parent != (wanted[first - 1] if first else None):
            raise Violation(f"page {first} of {request.id} is told of with a parent that is not the page before it")
        if twice := self.pages.keys() & set(pages):
            raise Violation(f"pages are told of twice without being removed: {sorted(twice)}")
        self.pages.update(zip(pages, keys, strict=True))

    def removed(self, pages: Iterable[int]) -> None:
        """Only what was told of is removed. Raises ``Violation``."""
        for page in pages:
            if self.pages.pop(page, None) is None:
                raise Violation(f"page {page} is removed, and nobody was told that it was there")

    def cleared(self) -> None:
        """Nothing is left."""
        self.pages.clear()

    # ---- to look at

    def compare(self, *prompts: Sequence[int], **fields: str) -> None:
        """Raise ``Violation`` where what was told, listed, peeked at and found is not one and the same."""
        cache = self._bench.cache
        contents = cache.contents()
        if self.watched and contents is not None and contents != self.pages:
            silent = sorted(contents.keys() - self.pages.keys())
            gone = sorted(self.pages.keys() - contents.keys())
            raise Violation(f"pages that are there and not told of: {silent}; told of and not there: {gone}; or keys")
        known = self.pages if self.watched else contents
        for prompt in prompts:
            self._compare_one(prompt, None if known is None else set(known.values()), fields)

    def _compare_one(self, prompt: Sequence[int], known: set[bytes] | None, fields: dict[str, str]) -> None:
        bench, cache = self._bench, self._bench.cache
        namespace, packed = namespace_digest("bench", fields.get("adapter", ""), fields.get("salt", "")), pack(prompt)
        before = cache.numbers(), list(cache.victims(bench.pool.num_pages)), list(cache.candidates())
        peeked = cache.peek(namespace, packed)
        after = cache.numbers(), list(cache.victims(bench.pool.num_pages)), list(cache.candidates())
        if before != after:
            raise Violation("peek changed the numbers, or what is evicted first")
        said = None if known is None else first_known(page_digests(namespace, packed, bench.size), known)
        if said is not None and peeked is not None and peeked != said:
            raise Violation(f"peek says {peeked} pages of a prompt, and {said} are there by what was told or listed")
        found = bench.found([*prompt, 0], **fields) // bench.size  # one more: the last token is never matched
        most = said if said is not None else peeked
        if most is not None and found > most:
            raise Violation(f"{found} pages of a prompt are found, and {most} are there by what was told or listed")
