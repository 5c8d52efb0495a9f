"""What the receiver asks a peer, and what it does with the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.plugins.connectors import _handoff_wire as wire
from engine.plugins.connectors._handoff_rows import Rows, checksum
from engine.plugins.connectors._handoff_wire import Kind, LeaseEnded, Line, LineError


def find(line: Line, keys: Sequence[bytes], wait: float) -> tuple[int, int]:
    """Claim and number of pages that the peer has of these keys. Raises ``LineError``."""
    body = wire.PREFIX.pack(int(wait * 1000)) + b"".join(keys)
    _, answer = line.ask(Kind.PREFIX, body, Kind.FOUND)
    claim, count = wire.unpacked(wire.FOUND, answer)
    if count > len(keys):
        raise LineError(f"it has {count} pages of {len(keys)}")
    return claim, count


def release(line: Line, claim: int) -> bool:
    """Whether the peer held the claim until now; it ends. Raises ``LineError``."""
    kind, _ = line.ask(Kind.RELEASE, wire.CLAIM.pack(claim), Kind.HELD, Kind.EXPIRED)
    return kind is Kind.HELD


def renew(line: Line, claim: int) -> bool:
    """Whether the peer goes on to hold the claim. Raises ``LineError``."""
    kind, _ = line.ask(Kind.RENEW, wire.CLAIM.pack(claim), Kind.HELD, Kind.EXPIRED)
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
        raise LeaseEnded("the peer's lease had ended")
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
