"""What a request's metadata says to connectors that hand KV from engine to engine.

``kv_role`` prefill: lease what is computed for it (decode: nothing). ``kv_with`` NAME: only the connector of that name
does. ``kv_from`` HOST:PORT, or NAME://HOST:PORT for the connector of that name alone: fetch its prefix there.
``kv_wait`` seconds: how long a look-up waits for pages that are not computed yet. ``kv_expect`` true: the peer is
computing this prompt now, so take pages at once and fill them as they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FROM, ROLE, WITH, EXPECT, WAIT = "kv_from", "kv_role", "kv_with", "kv_expect", "kv_wait"
PREFILL = "prefill"


class BadHint(ValueError):
    """A hint that makes no sense; the words name it."""


@dataclass(frozen=True, slots=True)
class Hints:
    """The hints of one request.

    Args:
        address: where its prefix is, ``host:port``; empty: nowhere.
        via: the only connector that is to fetch it; empty: any.
        leased: whether what is computed for it is to be leased.
        by: the only connector that is to lease it; empty: any.
        expected: whether the peer is computing it now.
        wait: seconds that a look-up waits; ``None``: as the connector does.
    """

    address: str = ""
    via: str = ""
    leased: bool = False
    by: str = ""
    expected: bool = False
    wait: float | None = None

    def fetches(self, connector: str) -> bool:
        """Whether this connector is to look for the prefix."""
        return bool(self.address) and self.via in ("", connector)

    def leases(self, connector: str) -> bool:
        """Whether this connector is to lease what is computed."""
        return self.leased and self.by in ("", connector)


def read_hints(said: Mapping[str, Any]) -> Hints:
    """What they say. Raises ``BadHint``. Numbers and truths may be text, as metadata that came over HTTP is."""
    via, address = _source(said.get(FROM))
    role = said.get(ROLE)
    if role not in (None, PREFILL, "decode"):
        raise BadHint(f"{ROLE} is {role!r}: prefill or decode is expected")
    by = said.get(WITH, "")
    if not isinstance(by, str):
        raise BadHint(f"{WITH} is {by!r}: a connector's name is expected")
    return Hints(address, via, role == PREFILL, by, _truth(said.get(EXPECT, False)), _seconds(said.get(WAIT)))


def _source(value: object) -> tuple[str, str]:
    if value is None:
        return "", ""
    if isinstance(value, str):
        via, mark, address = value.rpartition("://")
        if address.rpartition(":")[2].isdecimal() and bool(via) == bool(mark):
            return via, address
    raise BadHint(f"{FROM} is {value!r}: host:port is expected, or name://host:port")


def _truth(value: object) -> bool:
    known = {True: True, False: False, "true": True, "false": False}
    if isinstance(value, bool | str) and value in known:
        return known[value]
    raise BadHint(f"{EXPECT} is {value!r}: true or false is expected")


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadHint(f"{WAIT} is {value!r}: seconds are expected")
    return seconds
