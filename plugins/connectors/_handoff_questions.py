"""What the receiver asks a peer, and what it does with the answers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from engine.plugins.connectors import _handoff_wire as wire
from engine.plugins.connectors._handoff_rows import Rows, checksum
from engine.plugins.connectors._handoff_wire import Kind, LeaseEnded, Line, LineError

ENDED = "the peer's lease had ended"


class NotSent(LineError):
    """The peer is well, and could not write to us. ``over``: nothing is written any more."""

    well = True

    def __init__(self, words: str, *, over: bool) -> None:
        super().__init__(words)
        self.over = over


def find(line: Line, keys: Sequence[bytes], wait: float = 0.0, enough: int = 0, claim: int = 0) -> tuple[int, int]:
    """Claim and number of pages that the peer has of these keys, from the first on. Raises ``LineError``.

    Args:
        wait: seconds that the peer may wait for pages that it has not computed yet; less than the line's ``stall``.
        enough: so many pages need not be waited for; 0: all of them.
        claim: what is claimed already. The answer names the same one, if no other has more.
    """
    body = wire.PREFIX.pack(claim, enough or len(keys), int(wait * 1000)) + b"".join(keys)
    _, answer = line.ask(Kind.PREFIX, body, Kind.FOUND)
    number, count = wire.unpacked(wire.FOUND, answer)
    if count > len(keys):
        raise LineError(f"it has {count} pages of {len(keys)}")
    return number, count


def release(line: Line, claim: int) -> bool:
    """Whether the peer held the claim until now; it ends. Raises ``LineError``."""
    kind, _ = line.ask(Kind.RELEASE, wire.CLAIM.pack(claim), Kind.HELD, Kind.EXPIRED)
    return kind is Kind.HELD


def renew(line: Line, claim: int) -> bool:
    """Whether the peer goes on to hold the claim. Raises ``LineError``."""
    kind, _ = line.ask(Kind.RENEW, wire.CLAIM.pack(claim), Kind.HELD, Kind.EXPIRED)
    return kind is Kind.HELD


def places(line: Line, claim: int, keys: Sequence[bytes]) -> list[int]:
    """The peer's numbers of the pages, as far as it has them. Raises ``LineError``."""
    kind, body = line.ask(Kind.PLACES, wire.CLAIM.pack(claim) + b"".join(keys), Kind.PLACED, Kind.EXPIRED)
    if kind is Kind.EXPIRED:
        raise LeaseEnded(ENDED)
    if len(body) % 4 or len(body) > 4 * len(keys):
        raise LineError(f"{len(body)} bytes for the places of {len(keys)} pages")
    return [number for (number,) in struct.iter_unpack(">I", body)]


def want(
    line: Line, number: int, claim: int, offset: int, keys: Sequence[bytes], *, checked: bool
) -> tuple[int, int]:  # fmt: skip
    """Have the peer write pages into our staging area, and wait until it has. Raises ``LineError``.

    Returns how many it has written, and their checksum. Raises ``NotSent`` where it says that it could not.
    """
    body = wire.WANT.pack(number, claim, offset, checked) + b"".join(keys)
    kind, body = line.ask(Kind.WANT, body, Kind.DONE, Kind.FAILED, Kind.EXPIRED)
    if kind is Kind.EXPIRED:
        raise LeaseEnded(ENDED)
    if kind is Kind.FAILED:
        (over,) = wire.unpacked(wire.FAILED, body[:1])
        raise NotSent(body[1:].decode(errors="replace"), over=bool(over))
    count, told = wire.unpacked(wire.DONE, body)
    if count > len(keys):
        raise LineError(f"it has written {count} pages of {len(keys)}")
    return count, told


def revoke(line: Line, number: int) -> bool:
    """Whether the peer may still write what it was asked to under this number; it does not begin any more.

    Raises ``LineError``.
    """
    kind, _ = line.ask(Kind.REVOKE, wire.CLAIM.pack(number), Kind.HELD, Kind.EXPIRED)
    return kind is Kind.HELD


def read(
    line: Line, claim: int, keys: Sequence[bytes], pages: Sequence[int], rows: Rows, good: Callable[[int], None],
    *, checked: bool = True,
) -> None:  # fmt: skip
    """Fill pages with what the peer has under the keys, straight into KV memory. Raises ``LineError``.

    Args:
        good: told how many pages, from the first on, are right, as they come. What is beyond may hold anything.
        checked: compare checksums of the bytes.
    """
    kind, body = line.ask(Kind.READ, wire.READ.pack(claim, checked) + b"".join(keys), Kind.GIVING, Kind.EXPIRED)
    if kind is Kind.EXPIRED:
        raise LeaseEnded(ENDED)
    (count,) = wire.unpacked(wire.GIVING, body)
    if count > len(keys):
        raise LineError(f"it gives {count} pages of {len(keys)}")
    first = 0
    while first < count:
        first = _batch(line, first, pages[:count], rows, checked=checked)
        good(first)
    line.answer(Kind.END)
    if count < len(keys):
        raise LeaseEnded(f"the peer has {count} of {len(keys)} pages")


def _batch(line: Line, first: int, pages: Sequence[int], rows: Rows, *, checked: bool) -> int:
    """Fill the next few pages; the number of the first after them."""
    kind, length = line.answer_head()
    if kind is not Kind.PAGES or length < wire.PAGES.size:
        raise LineError(f"it sends {kind.name} instead of pages")
    begin, count, told = wire.unpacked(wire.PAGES, line.take(wire.PAGES.size))
    end = first + count
    if begin != first or not count or end > len(pages) or length != wire.PAGES.size + count * rows.page_bytes:
        raise LineError("it sends other pages than those that are due")
    memory = rows.of(pages[first:end])
    line.fill(memory)
    if checked and checksum(memory) != told:
        raise LineError(f"the bytes of pages {first} to {end} do not fit their checksum")
    return end
