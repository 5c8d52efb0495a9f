"""Who two engines say they are, and whether pages of the one fit the other."""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine.plugins.connectors._handoff_wire import PROTOCOL, LineError


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an engine is. Two exchange pages where all is equal that shapes them; names need not be.

    Args:
        connector: its kind, as ``local``.
        lease: seconds that pages wait to be fetched.
        mover: how its transport moves pages: ``pulled``, ``pushed``; ``streamed`` without one.
        card: how the transport reaches it; empty: it does not.
        regions: ``[address, bytes a row, rows]`` of each region of KV memory, where the transport reads them.
        staging: ``[address, bytes]`` of where the transport may write, if it does.
    """

    name: str
    incarnation: str
    connector: str
    layout: str
    page_bytes: int
    page_size: int
    model: str
    fingerprint: str
    lease: float
    mover: str = "streamed"
    card: str = ""
    regions: tuple[tuple[int, int, int], ...] = ()
    staging: tuple[int, int] = (0, 0)
    protocol: int = PROTOCOL

    def quarrel(self, other: Identity) -> str:
        """What differs that must not, in words for the engine of this one; empty where pages fit."""
        if self.connector != other.connector:
            return f"it is a {other.connector!r} connector and this is {self.connector!r}"
        must = ("protocol", "fingerprint", "page_size", "page_bytes", "layout")
        words = [
            f"{name.replace('_', ' ')} is {getattr(self, name)!r} at {self.name} and {getattr(other, name)!r} at "
            f"{other.name}"
            for name in must
            if getattr(self, name) != getattr(other, name)
        ]
        return "; ".join(words)

    def told(self, **more: Any) -> bytes:
        """As the body of a message."""
        return json.dumps({**asdict(self), **more}).encode()

    @classmethod
    def heard(cls, said: dict[str, Any]) -> Identity:
        """From the body of a message. Raises ``LineError``."""
        try:
            values = {field.name: said[field.name] for field in fields(cls)}
        except KeyError as error:
            raise LineError(f"it does not tell its {error}") from None
        regions, staging = values.pop("regions"), values.pop("staging")
        numbers = ("page_bytes", "page_size", "protocol")
        if not (
            all(_fits(value, int if name in numbers else str) for name, value in values.items() if name != "lease")
            and _fits(values["lease"], int | float)
            and values["lease"] > 0
            and isinstance(regions, list)
            and all(_numbers(region, 3) for region in regions)
            and _numbers(staging, 2)
        ):
            raise LineError("what it tells of itself makes no sense")
        return cls(**values, regions=tuple(map(tuple, regions)), staging=tuple(staging))


def _fits(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _numbers(value: object, count: int) -> bool:
    """Whether it is a list of so many numbers that an address or a size may be."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(_fits(number, int) and 0 <= number < 1 << 63 for number in value)
    )


def proof(token: str, nonce: str) -> str:
    """That one knows the token, without saying it."""
    return hmac.digest(token.encode(), nonce.encode(), "sha256").hex()


def proves(said: dict[str, Any], token: str, nonce: str) -> bool:
    """Whether the other side knows the token."""
    return hmac.compare_digest(str(said.get("proof", "")).encode(), proof(token, nonce).encode())


def greeting(nonce: str) -> bytes:
    """The body of the first message of all."""
    return json.dumps({"protocol": PROTOCOL, "nonce": nonce}).encode()
