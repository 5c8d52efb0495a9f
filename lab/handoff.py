"""KV from simulated engines that compute prompts to those that answer: transfers that take modelled time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector, Context, PluginOptions

SOURCE = "kv_source"  # in a request's metadata: which engine has computed its prompt


@dataclass(slots=True)
class Links:
    """The network: each engine sends, and receives, one transfer after the other.

    Attributes:
        bandwidth: bytes a second of an engine's link, each way.
        latency: seconds of a transfer of nothing.
        page_bytes: bytes of a page of KV.
        moved: bytes so far.
        free: engine, direction -> when it is free.
    """

    bandwidth: float
    latency: float
    page_bytes: int
    moved: float = 0.0
    free: dict[tuple[str, str], float] = field(default_factory=dict)

    def send(self, source: str, target: str, pages: int, now: float) -> float:
        """When a transfer is done that is asked for now. Mutates."""
        size = pages * self.page_bytes
        ends = ((source, "out"), (target, "in"))
        done = max(now, *(self.free.get(end, 0.0) for end in ends)) + self.latency + size / self.bandwidth
        self.free.update(dict.fromkeys(ends, done))
        self.moved += size
        return done


class ModelledHandoff(Connector):
    """The receiving end. A request that names its source finds all whole pages of its prompt there.

    The core's own exchange does the rest: the request is parked, takes pages, and queues when they are filled.
    """

    name = "modelled-handoff"
    loads = True
    holds = True
    patience = float("inf")

    class Options(PluginOptions):
        engine: str = Field("", description="who receives")

    links: Links

    def start(self, context: Context) -> None:
        """Go by the engine's clock."""
        self._clock: Callable[[], float] = context.clock
        self._size = context.limits.page_size
        self._open: list[tuple[float, str]] = []  # when, transfer

    @hookimpl
    def transfer_kv(self, transfers: Sequence[Transfer]) -> Sequence[TransferEvent]:
        """Look-ups are answered at once, transfers when their time has come, cancelled or not."""
        now, events = self._clock(), []
        for wish in transfers:
            source = str(wish.hints.get(SOURCE, ""))
            if wish.kind == "probe":
                tokens = len(wish.keys) * self._size if source else 0
                events.append(TransferEvent(wish.id, "found", tokens=tokens))
            elif wish.kind == "pull":
                self._open.append((self.links.send(source, self.options.engine, len(wish.pages), now), wish.id))
        if self._open:
            events += [TransferEvent(name, "done") for when, name in self._open if when <= now]
            self._open = [one for one in self._open if one[0] > now]
        return events
