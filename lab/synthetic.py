"""Independent requests: how they come (Poisson, in bursts, regularly, all at once) and how long they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import accumulate, islice, repeat, takewhile
from random import Random
from typing import ClassVar

from pydantic import Field

from engine.core.errors import ConfigError
from engine.lab.arrivals import Arrival, Piece, Workload, seed_of
from engine.lab.lengths import distribution, whole
from engine.lab.spelled import Source

REQUESTS = 1000  # where neither a number nor a time is given


class Independent(Source):
    """Requests that have nothing to do with each other, but for beginnings that some share."""

    requests: int | None = Field(None, ge=1, description="how many (default: 1000, or as many as come in duration)")
    duration: float | None = Field(None, gt=0, description="seconds in which they come")
    prompt: str = Field("512", description="tokens of a prompt, its shared beginning left out")
    output: str = Field("128", description="tokens of an answer")
    prefix: int = Field(0, ge=0, description="tokens with which prompts begin alike")
    prefixes: int = Field(1, ge=1, description="different such beginnings, all equally often")
    tenants: int = Field(1, ge=1, description="tenants, all equally often")
    deadline: float | None = Field(None, gt=0, description="seconds after which a request ends unfinished")
    max_tokens: int | None = Field(
        None, ge=1, description="tokens that a request asks for, where its answer ends before (default: its answer's)"
    )

    @abstractmethod
    def times(self, rng: Random) -> Iterator[float]:
        """When they come, in seconds, rising, without end."""

    def make(self, seed: int = 0) -> Workload:
        """The times are drawn first: with other lengths they stay the same."""
        times = self.times(Random(seed_of(seed, self.name, "times")))
        if self.duration is not None:
            end = self.duration
            times = takewhile(lambda when: when < end, times)
        if self.requests is not None or self.duration is None:
            times = islice(times, self.requests or REQUESTS)
        prompt, output = distribution(self.prompt, "prompt"), distribution(self.output, "output")
        rng, arrivals = Random(seed_of(seed, self.name, "lengths")), []
        for number, when in enumerate(times):
            own = Piece(seed_of(seed, self.name, "own", number), whole(prompt, rng))
            start = [Piece(seed_of(seed, "prefix", rng.randrange(self.prefixes)), self.prefix)] if self.prefix else []
            answer = whole(output, rng)
            arrivals.append(
                Arrival(
                    f"r{number}",
                    when,
                    (*start, own),
                    answer,
                    deadline=self.deadline,
                    max_tokens=max(self.max_tokens, answer) if self.max_tokens else 0,
                    tenant=f"t{rng.randrange(self.tenants)}" if self.tenants > 1 else "",
                )
            )
        return Workload(arrivals, self.spelled())


class Poisson(Independent):
    """Each comes when it likes: exponential gaps. What many independent users look like."""

    name: ClassVar[str] = "poisson"
    rate: float = Field(..., gt=0, description="requests a second")

    def times(self, rng: Random) -> Iterator[float]:
        """Exponential gaps."""
        return accumulate(rng.expovariate(self.rate) for _ in repeat(None))


class Constant(Independent):
    """One every so often."""

    name: ClassVar[str] = "constant"
    rate: float = Field(..., gt=0, description="requests a second")

    def times(self, rng: Random) -> Iterator[float]:
        """Equal gaps, the first at once."""
        return (number / self.rate for number, _ in enumerate(repeat(None)))


class Gamma(Independent):
    """Gaps of a gamma distribution: burstier than Poisson where ``cv`` is above 1, more regular below."""

    name: ClassVar[str] = "gamma"
    rate: float = Field(..., gt=0, description="requests a second, in the mean")
    cv: float = Field(2.0, gt=0, description="standard deviation of the gaps, in parts of their mean; 1: Poisson")

    def times(self, rng: Random) -> Iterator[float]:
        """Gamma gaps."""
        shape = 1 / self.cv**2
        scale = 1 / (self.rate * shape)
        return accumulate(rng.gammavariate(shape, scale) for _ in repeat(None))


class Bursts(Independent):
    """Quiet and busy spells in turns, of exponential length; Poisson within each (a Markov-modulated process)."""

    name: ClassVar[str] = "bursts"
    rate: float = Field(..., gt=0, description="requests a second, in the mean")
    burst: float = Field(5.0, ge=1, description="how many times the quiet rate the busy one is")
    busy: float = Field(10.0, gt=0, description="mean seconds of a busy spell")
    quiet: float = Field(50.0, gt=0, description="mean seconds of a quiet spell; the workload begins with one")

    def times(self, rng: Random) -> Iterator[float]:
        """A gap that reaches over the end of a spell is drawn anew from there: it has no memory."""
        low = self.rate * (self.busy + self.quiet) / (self.burst * self.busy + self.quiet)
        now, busy = 0.0, False
        while True:
            end = now + rng.expovariate(1 / (self.busy if busy else self.quiet))
            while (now := now + rng.expovariate(low * self.burst if busy else low)) < end:
                yield now
            now, busy = end, not busy


class AtOnce(Independent):
    """All at the start: the greatest throughput there is."""

    name: ClassVar[str] = "batch"

    def times(self, rng: Random) -> Iterator[float]:
        """Zero for ever."""
        if self.requests is None and self.duration is not None:
            raise ConfigError("workload batch: requests says how many there are, not duration")
        return repeat(0.0)


KINDS = (Poisson, Constant, Gamma, Bursts, AtOnce)
