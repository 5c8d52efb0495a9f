"""Who gets a request: the engine that has seen its beginning, if that one is not busier than the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.proxy.options import ProxyOptions
from engine.proxy.peers import Peer


class Choice(NamedTuple):
    """Who was chosen; ``by_prefix``: for what it has seen."""

    peer: Peer
    by_prefix: bool


class Chooser:
    """Chooses among engines that are ready. Cache-aware as SGLang's router is: the longest known beginning of the
    prompt, where it is a fair share of it and the load is not out of balance; else the fewest open requests."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._turns = 0

    def choose(self, peers: Sequence[Peer], chain: Sequence[bytes]) -> Choice | None:
        """One of them, which is taken to have the prompt from now on; ``None`` if there are none. Mutates."""
        if not peers:
            return None
        choice = self._favourite(peers, chain) or Choice(min(peers, key=self._order), by_prefix=False)
        self._turns += 1
        choice.peer.turn = self._turns
        choice.peer.index.record(chain)
        return choice

    def _order(self, peer: Peer) -> tuple[int, int]:
        """Fewest open requests first, then who waited longest for its turn."""
        return (0 if self._options.policy == "round-robin" else peer.open, peer.turn)

    def _favourite(self, peers: Sequence[Peer], chain: Sequence[bytes]) -> Choice | None:
        options = self._options
        if options.policy != "cache-aware" or not chain:
            return None
        best = min(peers, key=lambda peer: (-peer.index.match(chain), *self._order(peer)))
        known = best.index.match(chain)
        if known == 0 or known < options.match_threshold * len(chain):
            return None
        least = min(peer.open for peer in peers)
        if best.open > least + options.balance_abs and best.open > options.balance_rel * least:
            return None
        return Choice(best, by_prefix=True)
