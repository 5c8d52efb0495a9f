"""The engines behind the proxy: what each says of itself, how it is, and who can hand KV to whom."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Literal, NamedTuple

from engine.proxy.index import PrefixIndex
from engine.proxy.options import Address

Side = Literal["prefill", "decode"]
OTHER_SIDE: Mapping[Side, str] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True)
class Card:
    """What an engine says of itself at ``/v1/engine``. Connectors: name -> where and what each is."""

    incarnation: str
    role: str
    model: str
    fingerprint: str
    page_size: int
    connectors: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, said: Any) -> Card:
        """Raises ``ValueError`` where it is not what an engine says."""
        try:
            connectors = {str(name): dict(about) for name, about in said["connectors"].items()}
            texts = {name: str(said[name]) for name in ("incarnation", "role", "model", "fingerprint")}
            return cls(**texts, page_size=int(said["page_size"]), connectors=connectors)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError("it does not say what it is: GET /v1/engine is not that of an engine") from error

    def handing(self, side: Side) -> dict[str, Mapping[str, Any]]:
        """Its connectors that hand KV over and may be this side of it."""
        able = {name: about for name, about in self.connectors.items() if "role" in about and "address" in about}
        return {name: about for name, about in able.items() if about["role"] != OTHER_SIDE[side]}


@dataclass(eq=False)
class Peer:
    """One engine, on one side.

    Attributes:
        card: what it said last; ``None`` before it has said anything.
        ready: whether it gets requests.
        cause: why it is not ready.
        open: requests that it has now.
        failures: requests that failed there, one after the other.
        turn: when it was chosen last, counted in choices.
        bell: rung when somebody doubts that it lives.
    """

    address: Address
    side: Side
    index: PrefixIndex
    card: Card | None = None
    ready: bool = False
    cause: str = "it has not been heard of yet"
    open: int = 0
    failures: int = 0
    turn: int = 0
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    _scopes: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Where it is; its name in messages."""
        return self.address.url

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While inside, a request is open there."""
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    @contextmanager
    def while_heard(self, scope: asyncio.Timeout) -> Iterator[None]:
        """While inside, ``scope`` times out when the engine is taken for gone."""
        self._scopes.add(scope)
        try:
            yield
        finally:
            self._scopes.discard(scope)

    def suspect(self, cause: str) -> None:
        """A request failed there: no others until it has been looked at, which is done at once. Mutates."""
        self.failures += 1
        if self.ready:
            self.ready, self.cause = False, cause
            self.bell.set()

    def gone(self, cause: str) -> None:
        """It answers nothing any more: whoever waits for it need not. Mutates."""
        self.ready, self.cause = False, cause
        for scope in self._scopes:
            break_off(scope)
        self._scopes.clear()
        self.index.clear()

    def heard(self, card: Card) -> bool:
        """It said what it is; True if it is another than before. Mutates."""
        another = self.card is not None and self.card.incarnation != card.incarnation
        if another or (self.card is not None and self.card.fingerprint != card.fingerprint):
            self.index.clear()
        self.card = card
        return another


def break_off(scope: asyncio.Timeout) -> None:
    """Let whatever is inside end with ``TimeoutError``, unless it has ended."""
    with suppress(RuntimeError):  # it has
        scope.reschedule(asyncio.get_running_loop().time())


class Handover(NamedTuple):
    """How KV comes from one engine to another: the hints for both."""

    giver: dict[str, str]
    taker: dict[str, str]


def handover(giver: Peer, taker: Peer, wanted: str = "") -> Handover | str:
    """How two engines are paired, or in words why they are not.

    Args:
        wanted: the connector that it must be; empty: the first that both have.
    """
    mine, theirs = giver.card, taker.card
    if mine is None or theirs is None:
        return f"{(giver if mine is None else taker).url} has not said yet what it is"
    if mine.incarnation == theirs.incarnation:
        return f"{giver.url} and {taker.url} are the same engine"
    for what in ("fingerprint", "page_size"):
        a, b = getattr(mine, what), getattr(theirs, what)
        if a != b:
            return f"{what} is {a!r} at {giver.url} and {b!r} at {taker.url}"
    gives, takes = mine.handing("prefill"), theirs.handing("decode")
    both = [name for name in gives if name in takes and wanted in ("", name) and gives[name]["address"]]
    if not both:
        which = f"connector {wanted!r}" if wanted else "a connector in common"
        return f"{giver.url} (gives by: {_list(gives)}) and {taker.url} (takes by: {_list(takes)}) have not {which}"
    name = both[0]
    if "layout" in gives[name] and gives[name]["layout"] != takes[name].get("layout", gives[name]["layout"]):
        return f"the KV of {giver.url} and {taker.url} is laid out differently"
    where = reach(str(gives[name]["address"]), giver.address)
    host = where.rpartition(":")[0].strip("[]")
    if is_loopback(host) and not giver.address.kv_host and not _on_one_host(giver.address.host, taker.address.host):
        return (
            f"connector {name!r} of {giver.url} listens on {where}, which {taker.url} cannot reach: start it with "
            f"--connector.{name}.host 0.0.0.0, or say --prefill {giver.url},kv_host=HOST"
        )
    return Handover(
        {"kv_role": "prefill", **({"kv_with": name} if len(gives) > 1 else {})},
        {"kv_from": where if len(takes) == 1 else f"{name}://{where}"},
    )


def reach(address: str, of: Address) -> str:
    """A connector's ``host:port`` as others reach it: at the host that was given for it, or, where it listens on all
    interfaces, at that of the HTTP server."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if of.kv_host or host == "" or is_wildcard(host):
        host = of.kv_host or of.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether who listens there listens on all interfaces."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _on_one_host(a: str, b: str) -> bool:
    return a == b or (is_loopback(a) and is_loopback(b))


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"
