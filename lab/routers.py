"""Who gets a request, where there are several engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.core.errors import ConfigError
from engine.core.identity import pack, page_digests


class Router(ABC):
    """Chooses an engine for each request. It knows what it has sent and what came back, as a router in front does.

    Args:
        engines: how many there are, numbered from 0.

    Attributes:
        open: requests that each engine has.
        tokens: tokens that each engine owes: of prompts that it has not answered yet, and of answers that were asked
            for.
    """

    name = ""

    def __init__(self, engines: int) -> None:
        self.open = [0] * engines
        self.tokens = [0] * engines
        self._next = 0

    def least(self, counts: Sequence[int]) -> int:
        """The engine with the least; of equals the next in turn, so that idle engines are not all the first. Mutates
        whose turn it is."""
        fewest = min(counts)
        try:
            chosen = counts.index(fewest, self._next)
        except ValueError:
            chosen = counts.index(fewest)
        self._next = (chosen + 1) % len(counts)
        return chosen

    @abstractmethod
    def choose(self, prompt: Sequence[int]) -> int:
        """The engine for a prompt. May mutate what it remembers of prompts, and nothing else."""

    def sent(self, engine: int, tokens: int) -> None:
        """A request of so many tokens (prompt and answer) went to the engine. Mutates."""
        self.open[engine] += 1
        self.tokens[engine] += tokens

    def answered(self, engine: int, prompt: int) -> None:
        """The first token came: the prompt is done. Mutates."""
        self.tokens[engine] -= prompt

    def ended(self, engine: int, tokens: int) -> None:
        """A request has ended; ``tokens`` are what is left of those that it was sent with. Mutates."""
        self.open[engine] -= 1
        self.tokens[engine] -= tokens


class RoundRobin(Router):
    """One after the other."""

    name = "round-robin"

    def choose(self, prompt: Sequence[int]) -> int:
        """Whose turn it is."""
        chosen, self._next = self._next, (self._next + 1) % len(self.open)
        return chosen


class LeastOpen(Router):
    """The one with the fewest open requests."""

    name = "least-open"

    def choose(self, prompt: Sequence[int]) -> int:
        """Looks at no prompt."""
        return self.least(self.open)


class LeastTokens(Router):
    """The one that owes the fewest tokens."""

    name = "least-tokens"

    def choose(self, prompt: Sequence[int]) -> int:
        """Looks at no prompt."""
        return self.least(self.tokens)


class PrefixAware(Router):
    """The one that was sent the longest beginning of the prompt, as long as it is not far busier than the others.

    Source: the cache-aware policy of SGLang's router, which remembers in a tree what it has sent; here the beginnings
    are known by digests of their blocks. Like ``engine proxy --policy cache-aware``.
    """

    name = "prefix"
    BLOCK = 64  # tokens
    MATCH = 0.3  # of a prompt: less is no reason to go anywhere
    BALANCE_ABS, BALANCE_REL = 32, 1.5  # who has more open requests than the least busy by both is far busier
    BLOCKS = 1 << 16  # remembered of each engine, least recently used go first

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._engines_of: dict[bytes, set[int]] = {}
        self._seen: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(engines)]

    def choose(self, prompt: Sequence[int]) -> int:
        """Remembers the prompt as the chosen engine's."""
        blocks = page_digests(b"", pack(prompt), self.BLOCK)
        most, least = max(self.open), min(self.open)
        known, matched = self._longest(blocks)
        if most > least + self.BALANCE_ABS and most > least * self.BALANCE_REL:
            chosen = self.least(self.open)
        elif known and matched * self.BLOCK >= self.MATCH * len(prompt):
            chosen = min(known, key=lambda engine: (self.open[engine], engine))
        else:
            chosen = self.least(self.tokens)
        self._remember(chosen, blocks)
        return chosen

    def _longest(self, blocks: Sequence[bytes]) -> tuple[set[int], int]:
        """The engines that were sent the most of these blocks, from the first on, and how many that are."""
        best: set[int] = set()
        for count, block in enumerate(blocks):
            engines = self._engines_of.get(block, set())
            still = engines if not count else best & engines
            if not still:
                return best, count
            best = set(still)
        return best, len(blocks)

    def _remember(self, engine: int, blocks: Sequence[bytes]) -> None:
        seen = self._seen[engine]
        for block in reversed(blocks):  # the first block is the last to go: without it the others are worth nothing
            seen[block] = None
            seen.move_to_end(block)
            self._engines_of.setdefault(block, set()).add(engine)
        while len(seen) > self.BLOCKS:
            gone, _ = seen.popitem(last=False)
            engines = self._engines_of[gone]
            engines.discard(engine)
            if not engines:
                del self._engines_of[gone]


ROUTERS: dict[str, Callable[[int], Router]] = {
    router.name: router for router in (RoundRobin, LeastOpen, LeastTokens, PrefixAware)
}


def router(name: str, engines: int) -> Router:
    """A router by name. Raises ``ConfigError``."""
    if name not in ROUTERS:
        raise ConfigError(f"router {name!r} is not known: there are {', '.join(ROUTERS)}")
    return ROUTERS[name](engines)
