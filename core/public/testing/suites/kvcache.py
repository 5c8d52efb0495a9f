"""What every KV cache must do: find the right content and no other, and keep exact books of every page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar

from engine.core.cache_events import CacheLog
from engine.core.errors import InvariantViolation, OutOfPages
from engine.core.protocols import Plugin
from engine.core.request import Request
from engine.testing.bench import CacheBench
from engine.testing.guard import Violation
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.suites.policy import decide_the_same
from engine.testing.told import Told
from engine.testing.workload import Situation, Workload, closing

NAMESPACES: tuple[dict[str, str], ...] = (
    {}, {"salt": "a"}, {"adapter": "a"}, {"salt": "a", "adapter": "a"}, {"salt": "aa"}, {"salt": ";adapter:1:a"},
)  # fmt: skip


class KVCacheSuite(Suite):
    """Rules of a KV cache. One that provides ``prefix-cache`` must find again what it was given.

    Class attributes:
        page_sizes: tokens a page, in the rules that are tried by hand.
    """

    role = "kvcache"
    page_sizes: ClassVar[tuple[int, ...]] = (1, 4)

    @classmethod
    def situations(cls) -> list[Situation]:
        """Both schedulers, page sizes and loops, plain and with everything going wrong."""
        return [
            Situation(scheduler, "-", page, overlap, drafts=bool(rough), faults=bool(rough), flaky=bool(rough))
            for scheduler, page, overlap, rough in itertools.product(
                ("unified", "radix"), (1, 4), (False, True), (0, 1)
            )
        ]

    def workload(self, situation: Situation, seed: int | None = None, requests: int = 18) -> Workload:
        """With somebody who listens: the audit after each step compares what was told with what is there."""
        chosen = self.seed if seed is None else seed
        plugins = {**self.plugins(situation), "cache_log": CacheLog(situation.page_size)}
        return Workload(chosen, situation, plugins, self.limits, requests)

    def try_once(self, plugin: Plugin) -> None:
        """One request, alone."""
        core = make_core(**{"kvcache": plugin, **self.limits})
        with closing(core):
            core.add([1, 2, 3])
            core.step()

    def benches(self) -> Iterator[CacheBench]:
        """A fresh cache for each page size."""
        for size in self.page_sizes:
            cache = self.make()
            yield CacheBench(cache, num_pages=32, page_size=size)
            cache.close()

    def remembers(self, bench: CacheBench) -> bool:
        """Whether it says that it keeps content."""
        return bench.cache.caching and "prefix-cache" in bench.cache.provides

    # ---- by hand

    def test_what_was_published_is_found(self) -> None:
        """Content that was published and let go of is found again: its longest prefix, in whole pages."""
        for bench in self.benches():
            size, base = bench.size, list(range(5 * bench.size))
            bench.remember(base)
            for common in (0, size, 2 * size + size // 2, 5 * size):
                found = bench.found([*base[:common], *range(900, 910)])
                wanted = common // size * size if self.remembers(bench) else 0
                if found > common or found != wanted:
                    raise Violation(f"of {common} tokens in common {found} are found, not {wanted} (page size {size})")

    def test_the_last_token_is_never_matched(self) -> None:
        """match finds whole pages and at most num_tokens - 1 tokens, also of what is cached as a whole."""
        for bench in self.benches():
            for pages in (1, 2, 5):
                prompt = [pages, *range(pages * bench.size - 1)]
                bench.remember(prompt)
                bench.found(prompt)
                bench.hold(bench.request(prompt))

    def test_namespaces_never_meet(self) -> None:
        """Equal tokens in another namespace (salt, adapter) are other content."""
        for bench in self.benches():
            prompt = list(range(3 * bench.size))
            for number, fields in enumerate(NAMESPACES):
                for other in NAMESPACES[number:]:
                    if found := bench.found(prompt, **other):
                        raise Violation(f"{found} tokens of another namespace are found by {other or 'nobody special'}")
                bench.remember(prompt, **fields)

    def test_different_beginnings_never_meet(self) -> None:
        """A page is its tokens and all that came before: the same page after another beginning is other content."""
        for bench in self.benches():
            size = bench.size
            tail = list(range(100, 100 + 2 * size))
            bench.remember([*range(size), *tail])
            for prompt in ([*range(500, 500 + size), *tail, 1], [*tail, 1], [*tail[size:], 1]):
                if found := bench.found(prompt):
                    raise Violation(f"{found} tokens are found of content that begins differently")

    def test_release_frees_exactly(self) -> None:
        """release gives back every page of the request and no other; a second release is harmless."""
        for bench in self.benches():
            one, other = (bench.request([number] * (3 * bench.size + 1)) for number in (1, 2))
            free = bench.pool.num_free
            bench.hold(one)
            bench.hold(other)
            bench.release(one)
            if bench.pool.num_free != free - 4:
                raise Violation(f"4 pages are in use, and {free - bench.pool.num_free} of {free} are gone")
            bench.cache.release(one, 0)
            bench.look()
            bench.release(other)

    def test_shared_pages_live_as_long_as_a_user(self) -> None:
        """Pages that two requests share stay until both let go, and are not to be evicted before."""
        for bench in self.benches():
            prompt = list(range(4 * bench.size))
            bench.remember(prompt)
            twins = [bench.request([*prompt, number]) for number in (1, 2)]
            for twin in twins:
                bench.hold(twin)
            bench.release(twins[0], keep=0)
            self._drop_everything(bench)
            bench.release(twins[1], keep=0)

    def test_only_idle_content_is_dropped(self) -> None:
        """drop frees idle content, exactly as much as it says; keys in use or unknown are skipped."""
        for bench in self.benches():
            kept = bench.request(list(range(3 * bench.size + 1)))
            bench.hold(kept)
            keys = bench.publish(kept)
            for number in range(3):
                bench.remember([500 + number] * (2 * bench.size))
            before = bench.look()
            if freed := bench.cache.drop([*keys, "nonsense", None, -1, 10**9, object()]):
                raise Violation(f"{freed} pages were freed by keys that are in use or unknown")
            if before != bench.look():
                raise Violation("dropping nothing changed the numbers")
            self._drop_everything(bench)
            bench.release(kept, keep=0)

    def test_eviction_delivers_what_is_needed(self) -> None:
        """victims name enough to free what is needed, as far as there is; candidates can all be dropped; neither
        changes anything."""
        for bench in self.benches():
            for number in range(4):
                bench.remember([100 + number] * (3 * bench.size))
            while (numbers := bench.look()).evictable:
                need = min(2, numbers.evictable)
                keys, candidates = list(bench.cache.victims(need)), list(bench.cache.candidates())
                if bench.look() != numbers:
                    raise Violation("asking for victims or candidates changed the numbers")
                if not candidates:
                    raise Violation(f"{numbers.evictable} pages are evictable, and there are no candidates")
                freed = bench.cache.drop(keys, need)
                if freed < need or bench.look().free - numbers.free != freed:
                    raise Violation(
                        f"{need} pages were needed of {numbers.evictable} evictable; drop says {freed}, "
                        f"{bench.look().free - numbers.free} became free"
                    )

    def test_what_was_unpublished_is_never_found(self) -> None:
        """Keys of a failed step that are taken back never match again, whoever holds the pages."""
        for bench in self.benches():
            prompt = list(range(3 * bench.size))
            request = bench.request(prompt)
            bench.hold(request)
            keys = bench.publish(request)
            bench.cache.unpublish(keys)
            bench.cache.unpublish([*keys, "nonsense"])
            if bench.cache.publish_when == "planned" and (found := bench.found([*prompt, 1])):
                raise Violation(f"{found} tokens are found that were taken back")
            bench.release(request, keep=0)

    def test_publishing_is_idempotent(self) -> None:
        """Publishing the same again, or less, changes nothing."""
        for bench in self.benches():
            request = bench.request(list(range(3 * bench.size)))
            bench.hold(request)
            bench.publish(request)
            before, pages = bench.look(), list(request.pages)
            if bench.publish(request) or bench.look() != before or request.pages != pages:
                raise Violation("publishing the same again had an effect")
            bench.release(request, keep=request.num_tokens)

    def test_out_of_pages_takes_none(self) -> None:
        """take raises OutOfPages when the pool has too few, and takes none."""
        for bench in self.benches():
            request = bench.request([1] * bench.size)
            bench.hold(request)
            free = bench.pool.num_free
            try:
                bench.cache.take(request, free + 1)
            except OutOfPages:
                bench.look()
            else:
                raise Violation(f"{free + 1} pages were taken of {free}")
            bench.release(request)

    def test_reset_forgets_what_is_idle(self) -> None:
        """After reset no idle content is left, and all pages that nobody uses are free."""
        for bench in self.benches():
            prompt = list(range(3 * bench.size))
            bench.remember(prompt)
            bench.cache.reset()
            if bench.look().free != bench.pool.num_pages or bench.found([*prompt, 1]):
                raise Violation(f"after reset there is content left: {bench.look()}")

    def test_what_is_told_is_what_is_there(self) -> None:
        """One that is watched tells exactly what it has, under the keys of its content; contents and peek say the same,
        and peek changes nothing. One that does not tell says so (watch, contents and peek are optional)."""
        for bench in self.benches():
            told, size = Told(bench), bench.size
            base = list(range(4 * size))
            branch = [*base[: 2 * size], *range(500, 500 + 2 * size)]
            bench.remember(base)
            told.compare(base, base[: 2 * size + 1])
            bench.remember(branch)
            bench.remember(base, salt="s")
            told.compare(base, branch)
            told.compare(base, salt="s")
            self._twins_tell(bench, told, list(range(300, 300 + 2 * size)))
            while bench.look().evictable:  # first to go first, a page or two at a time
                bench.cache.drop(list(bench.cache.victims(2)), 2)
                told.compare(base, branch)
            self._reset_tells(bench, told, base)

    def test_its_audit_sees_a_lie(self) -> None:
        """check raises where pages are held for a request that is not among those that run."""
        for bench in self.benches():
            request = bench.request([1] * (2 * bench.size))
            bench.hold(request)
            try:
                bench.cache.check([])
            except InvariantViolation:
                continue
            raise Violation("a request holds pages, check is told of nobody, and finds nothing wrong")

    # ---- in an engine

    def test_no_wrong_page_is_ever_read(self, situation: Situation) -> None:
        """No row reads KV that is not its own tokens', nothing leaks, every request ends and says what the model
        says, whatever fails and whichever scheduler is above."""
        self.workload(situation).run()

    def test_it_decides_the_same_again(self) -> None:
        """The same workload is decided the same: recordings replay, and a failure can be found again."""
        runs = [self.workload(self.situations()[2]) for _ in range(2)]
        for workload in runs:
            workload.run()
        decide_the_same(runs[0].decisions, runs[1].decisions)

    def _twins_tell(self, bench: CacheBench, told: Told, prompt: list[int]) -> None:
        """Two compute the same at a time; what one has published is taken back, where the cache can."""
        twins = [bench.request(prompt) for _ in range(2)]
        for twin in twins:
            bench.hold(twin)
        for twin in twins:
            keys = bench.publish(twin)
            told.compare(prompt)
        bench.cache.unpublish(keys)
        told.compare(prompt)
        for twin in twins:
            bench.release(twin, keep=0 if twin is twins[1] else twin.num_tokens)
            told.compare(prompt)

    def _reset_tells(self, bench: CacheBench, told: Told, prompt: list[int]) -> None:
        """All is forgotten while somebody uses it, and then computed anew."""
        holder = bench.request([*prompt, 1])
        bench.hold(holder)
        bench.publish(holder)
        told.compare(prompt)
        bench.cache.reset()
        told.compare(prompt)
        if found := bench.found([*prompt, 1]):
            raise Violation(f"{found} tokens are found after a reset")
        bench.release(holder, keep=holder.num_tokens)
        told.compare(prompt)
        bench.remember(prompt)
        told.compare(prompt)

    def _drop_everything(self, bench: CacheBench) -> None:
        """Drop all there is; those that run keep their pages."""
        wanted = bench.look().evictable
        pages: list[tuple[Request, list[int]]] = [(request, list(request.pages)) for request in bench.running]
        freed = 0
        while bench.look().evictable:
            more = bench.cache.drop([candidate.key for candidate in bench.cache.candidates()])
            if not more:
                raise Violation(f"{bench.look().evictable} pages are evictable, and dropping all candidates frees none")
            freed += more
        if freed != wanted or any(request.pages != before for request, before in pages):
            raise Violation(f"{wanted} pages were evictable, {freed} were freed")
