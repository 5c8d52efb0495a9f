"""All engines behind the proxy, looked at again and again: who is ready, who is gone, who fits whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from engine.proxy.index import PrefixIndex
from engine.proxy.options import Address, ProxyOptions
from engine.proxy.peers import Card, Handover, Peer, Side, handover

log = logging.getLogger("engine.proxy")

FIRST_REST, LONGEST_REST = 0.25, 2.0  # seconds that an engine which failed is left alone
KEEP_ALIVE = 2.0  # seconds; servers close idle connections after 5, and a request must not meet that


class Fleet:
    """The engines. Inside ``async with`` they are watched.

    Attributes:
        client: speaks HTTP with them.
        prefill, decode: those of each side.
        unseen: those that have not been looked at yet; none after the longest ``peer_timeout``.
    """

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self.prefill = [self._peer(address, "prefill") for address in options.prefill]
        self.decode = [self._peer(address, "decode") for address in options.decode]
        self.unseen: set[Peer] = {*self.prefill, *self.decode}
        self.client: httpx.AsyncClient
        self._watching: list[asyncio.Task[None]] = []
        self._told: dict[tuple[Peer, Peer], str] = {}
        self._pairs: dict[tuple[Peer, Peer], Handover | str] = {}

    def _peer(self, address: Address, side: Side) -> Peer:
        return Peer(address, side, PrefixIndex(self._options.index_size))

    async def __aenter__(self) -> Fleet:
        key = self._options.backend_api_key
        self.client = httpx.AsyncClient(
            headers={"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx.Timeout(None, connect=self._options.peer_timeout),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE),
            trust_env=False,  # engines are neighbours: no HTTP proxy between
        )
        self._watching = [asyncio.create_task(self._watch(peer)) for peer in (*self.prefill, *self.decode)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.client.aclose()

    def pair(self, giver: Peer, taker: Peer) -> Handover | None:
        """How one hands over to the other; ``None`` where it cannot, which the log has said why."""
        found = self._pairs.get((giver, taker))
        return found if isinstance(found, Handover) else None

    def givers(self, without: Iterable[Peer] = ()) -> list[Peer]:
        """Ready engines of the prefill side that at least one ready engine can take over from."""
        takers = [taker for taker in self.decode if taker.ready]
        ready = [giver for giver in self.prefill if giver.ready and giver not in without]
        return [giver for giver in ready if any(self.pair(giver, taker) for taker in takers)]

    def takers(self, giver: Peer | None, without: Iterable[Peer] = ()) -> list[Peer]:
        """Ready engines of the decode side; where there are some, only those that can take over from ``giver``."""
        ready = [taker for taker in self.decode if taker.ready and taker not in without]
        fitting = [taker for taker in ready if giver is not None and self.pair(giver, taker)]
        return fitting or ready

    def giving(self, giver: Peer) -> dict[str, str]:
        """Hints for who computes a prompt: what is right for all that may take it over."""
        ways = [set(pair.giver.items()) for taker in self.decode if (pair := self.pair(giver, taker)) is not None]
        return dict(set.intersection(*ways)) if ways else {}

    def problems(self) -> list[str]:
        """Pairs that are none, each in words."""
        return [found for found in self._pairs.values() if isinstance(found, str)]

    def describe(self) -> dict[str, Any]:
        """Every engine and how it is, for people."""
        return {"prefill": [_about(peer) for peer in self.prefill], "decode": [_about(peer) for peer in self.decode]}

    # ---- watching

    async def _watch(self, peer: Peer) -> None:
        """Look, wait, look again; sooner when a request has failed there."""
        misses = 0
        while True:
            was = peer.ready
            misses = 0 if await self._look_safely(peer) else misses + 1
            self.unseen.discard(peer)
            if was and not peer.ready:
                log.warning("%s engine %s gets no requests: %s", peer.side, peer.url, peer.cause)
            rest = min(LONGEST_REST, FIRST_REST * 2 ** (misses - 1)) if misses else self._options.poll
            doubted = await _rung(peer.bell, rest)
            if doubted:
                log.warning("%s engine %s is looked at: %s", peer.side, peer.url, peer.cause)
            if doubted and peer.failures > 1:  # it says that it is well, and request after request fails there
                await asyncio.sleep(min(LONGEST_REST, FIRST_REST * 2 ** (peer.failures - 2)))

    async def _look_safely(self, peer: Peer) -> bool:
        """What nobody thought of must not end the watch."""
        try:
            return await self._look(peer)
        except Exception as error:
            log.error("%s engine %s cannot be looked at", peer.side, peer.url, exc_info=error)
            peer.ready, peer.cause = False, f"{type(error).__name__}: {error}"
            return False

    async def _look(self, peer: Peer) -> bool:
        """Ask it what it is. True if it gets requests now."""
        try:
            answer = await self.client.get(f"{peer.url}/v1/engine", timeout=self._options.peer_timeout)
            said = _read(answer)
            card = Card.read(said)
            health: Mapping[str, Any] = said.get("health") or {}
        except httpx.TimeoutException:
            peer.gone(f"it has said nothing for {self._options.peer_timeout:g} s")
            return False
        except (httpx.HTTPError, ValueError) as error:
            peer.ready, peer.cause = False, str(error) or type(error).__name__
            return False
        if peer.heard(card):
            log.warning("%s engine %s was started anew", peer.side, peer.url)
        self._match(peer)
        if health.get("status") != "ok":
            peer.ready, peer.cause = False, f"its engine is not well: {health.get('cause')}"
            return False
        if not peer.ready:
            peer.ready, peer.cause = True, ""
            log.info("%s engine %s is ready: %s, model %s", peer.side, peer.url, card.role, card.model)
        return True

    def _match(self, peer: Peer) -> None:
        """Who fits whom may have changed. What does not fit is told once."""
        for giver in [peer] if peer.side == "prefill" else self.prefill:
            for taker in [peer] if peer.side == "decode" else self.decode:
                if giver.card is None or taker.card is None:
                    continue
                found = self._pairs[giver, taker] = handover(giver, taker, self._options.connector)
                if isinstance(found, str) and self._told.get((giver, taker)) != found:
                    log.warning("not paired: %s", found)
                    self._told[giver, taker] = found


def _read(answer: httpx.Response) -> dict[str, Any]:
    """What an engine says of itself. Raises ``ValueError`` with words for people."""
    if answer.status_code in (401, 403):
        raise ValueError("it wants another key: give its own with --backend-api-key")
    if answer.status_code != 200:
        raise ValueError(f"GET /v1/engine answers {answer.status_code}")
    try:
        said = msgspec.json.decode(answer.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"GET /v1/engine answers no JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError("GET /v1/engine answers no object")
    return said


async def _rung(bell: asyncio.Event, seconds: float) -> bool:
    """Wait so long at most; True if it was rung."""
    try:
        async with asyncio.timeout(seconds):
            await bell.wait()
    except TimeoutError:
        return False
    finally:
        bell.clear()
    return True


def _about(peer: Peer) -> dict[str, Any]:
    card = peer.card
    about: dict[str, Any] = {"url": peer.url, "ready": peer.ready, "cause": peer.cause or None, "open": peer.open}
    if card is not None:
        about |= {"role": card.role, "model": card.model, "fingerprint": card.fingerprint, "page_size": card.page_size}
        about["connectors"] = {name: said.get("address") for name, said in card.connectors.items()}
    return about


def none_ready(side: Side, peers: Sequence[Peer]) -> str:
    """Why nobody of a side can be asked, in words."""
    causes = "; ".join(f"{peer.url}: {peer.cause or 'it was tried'}" for peer in peers)
    return f"no {side} engine is ready" + (f" ({causes})" if causes else "")
