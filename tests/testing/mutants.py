"""Plugins that are broken on purpose, each in one way."""

from __future__ import annotations

import itertools
import random

from engine.core import Candidate, Plan, Policy, Reject, Scheduler, Wait, hookimpl
from engine.plugins.kvcache.paged import PagedCache
from engine.plugins.kvcache.radix import RadixCache
from engine.plugins.schedulers.unified import UnifiedScheduler

# ---- caches


class ForgetsNamespaces(PagedCache):
    """Equal tokens are equal content, whosever they are."""

    def _digests(self, request, count):
        namespace, request.namespace = request.namespace, b""
        try:
            return super()._digests(request, count)
        finally:
            request.namespace = namespace


class FreesPagesInUse(PagedCache):
    """The first of two sharers that leaves takes the pages along, and the audit looks away."""

    def release(self, request, keep):
        self._pool.give([page for page in request.pages if self._refs[page] > 1])
        super().release(request, keep)

    def check(self, requests):
        pass


class MatchesTheLastToken(RadixCache):
    """A prompt that is cached as a whole owes nothing."""

    def match(self, request):
        return self.probe(request)


class LeaksPages(PagedCache):
    """A page now and then is not given back."""

    def release(self, request, keep):
        pages, request.pages = request.pages, request.pages[: len(request.pages) // 2]
        super().release(request, keep)
        request.pages = pages

    def check(self, requests):
        pass


class CountsWhatItCannotEvict(PagedCache):
    """Promises pages that are in use."""

    def numbers(self):
        numbers = super().numbers()
        return numbers._replace(evictable=numbers.evictable + numbers.pinned, pinned=0)


class PromisesPagesInUse(CountsWhatItCannotEvict):
    """The same, and says so wherever it is asked: no two of its numbers contradict each other."""

    def available(self):
        return self.numbers().available


class ForgetsToUnpublish(PagedCache):
    """What a failed step published stays to be found."""

    def unpublish(self, keys):
        pass


class IgnoresWhatCameBefore(PagedCache):
    """A page is its own tokens, whatever came before them."""

    def _digests(self, request, count):
        size = self._page_size
        return [request.namespace + request.packed_tokens(at * size, (at + 1) * size) for at in range(count)]


class InventsCandidates(PagedCache):
    """Offers what cannot be dropped."""

    def candidates(self):
        return [Candidate(-1, 1, 0)]


class EvictsInSilence(PagedCache):
    """What was evicted is told to be there for ever."""

    def drop(self, keys, need=None):
        return len(self._drop(keys, need))


# ---- schedulers


class NeverGrants(Scheduler):
    """Looks at everybody and gives nobody anything."""

    name = "never-grants"

    @hookimpl
    def plan(self, step):
        list(step.queue())
        return step.seal()


class StarvesOne(UnifiedScheduler):
    """Serves whoever came last, first."""

    @hookimpl
    def order(self, waiting):
        return sorted(waiting, key=lambda request: -request.arrival_index)


class Forgets(UnifiedScheduler):
    """Every seventh request is never looked at while it runs."""

    @hookimpl
    def plan(self, step):
        for request in list(step.running):
            if request.arrival_index % 7:
                step.grant(request, step.budget)
        for request in step.queue():
            if not step.start(request, step.budget):
                break
        return step.seal()


class MakesItsOwnPlan(UnifiedScheduler):
    """Answers a plan that the core did not seal."""

    @hookimpl
    def plan(self, step):
        step.seal()
        return Plan(1, (), (), (), (), (), ())


class RollsDice(UnifiedScheduler):
    """Decides by what changes from run to run."""

    rolls = itertools.count()

    @hookimpl
    def order(self, waiting):
        shuffled = list(waiting)
        random.Random(next(self.rolls)).shuffle(shuffled)
        return shuffled


# ---- policies


class UnknownIds(Policy):
    """Orders by id instead of by request."""

    name = "unknown-ids"

    @hookimpl
    def order(self, waiting):
        return [request.id for request in waiting]


class Duplicates(Policy):
    """Everybody twice."""

    name = "duplicates"

    @hookimpl
    def order(self, waiting):
        return [*waiting, *waiting]


class Raises(Policy):
    """Trusts that everybody has a tenant's plan."""

    name = "raises"

    @hookimpl
    def admit(self, step, request):
        return Wait("later") if request.metadata["plan"] == "free" else None


class SaysNo(Policy):
    """A truth value is no answer."""

    name = "says-no"

    @hookimpl
    def admit(self, request):
        return False


class Mutates(Policy):
    """Pushes a request forward by making it more urgent."""

    name = "mutates"

    @hookimpl
    def order(self, waiting):
        for request in waiting:
            request.priority -= 1


class ShortensAnswers(Policy):
    """Saves time by ending requests behind the engine's back."""

    name = "shortens-answers"

    @hookimpl
    def commit(self, outcome):
        for request in outcome.plan.requests:
            request.max_total = min(request.max_total, request.num_prompt + 3)


class RejectsEverybody(Policy):
    """No request, no trouble."""

    name = "rejects-everybody"

    @hookimpl
    def admit(self, request):
        return Reject("not today")


class Slow:
    """Time that only passes where somebody spends it: nothing here depends on the machine."""

    now = 0.0

    @classmethod
    def clock(cls) -> float:
        cls.now += 1e-4
        return cls.now


class TakesItsTime(Policy):
    """Thinks for ten milliseconds about every order."""

    name = "takes-its-time"

    @hookimpl
    def order(self, waiting):
        Slow.now += 0.01


class Claims(Policy):
    """Says that it provides what only a cache can."""

    name = "claims"
    provides = frozenset({"prefix-cache"})


class Needs(Policy):
    """Requires what nobody has."""

    name = "needs"
    requires = frozenset({"teleport"})
