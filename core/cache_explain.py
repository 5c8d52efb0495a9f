"""Why a prompt's prefix is cached so far and no further."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from engine.core.cache_events import POOL
from engine.core.cache_watch import CacheWatch
from engine.core.errors import ConfigError
from engine.core.identity import namespace_digest, page_digests
from engine.core.request import SamplingParams
from engine.core.validate import check_fields, validate

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

MOST_CHAINS = 32
WORDS = {
    "last": "the last token is always computed, and with it the page that it is in",
    "off": "the cache was told to remember nothing",
    "computing": "a step in flight computes it",
    "tier": "the pool has forgotten it; it is kept in {tiers} and loaded when a request needs it",
    "kept": "it is cached, but the cache gives less: its own options say so",
    "evicted": "it was evicted",
    "flushed": "it was forgotten in a flush",
    "salt": "it is cached for another salt or adapter, which never share",
    "weights": "other weights computed it",
    "never": "it was never computed here, or so long ago that it is not remembered",
    "unknown": "it is not there; whether it ever was is known only with cache events (--cache-events on)",
}
"""Why a page is not found, in words."""


def explain(core: EngineCore, tokens: Sequence[int], *, salt: str, adapter: str) -> dict[str, Any]:
    """See ``CacheDesk.explain``."""
    _, packed = validate(tokens, SamplingParams(max_tokens=None), core.limits)
    check_fields(request_id=None, priority=0, salt=salt, adapter=adapter, metadata=None)
    size = core.limits.page_size
    namespace = namespace_digest(core.model.fingerprint, adapter, salt)
    useful = (len(tokens) - 1) // size  # pages that a cache may give
    pages = core.kv.peek(namespace, packed[: 4 * useful * size])
    if pages is None:
        raise ConfigError(f"kvcache {core.kv.name!r} cannot say what it has")
    keys = page_digests(namespace, packed, size)
    missing = None
    if pages * size < len(tokens):
        start, end = pages * size, min((pages + 1) * size, len(tokens))
        why, words = "last", WORDS["last"]
        if pages < useful:
            why, words = _reason(core, (adapter, salt), packed[: 4 * end], keys[pages])
        key = keys[pages].hex() if pages < len(keys) else None
        missing = {"page": pages, "tokens": [start, end], "key": key, "why": why, "words": words}
    epoch, sequence = core.cache.place
    return {
        "tokens": len(tokens),
        "page_size": size,
        "cached_tokens": pages * size,
        "cached_pages": pages,
        "missing": missing,
        "epoch": epoch,
        "sequence": sequence,
    }


def _reason(core: EngineCore, name: tuple[str, str], packed: bytes, key: bytes) -> tuple[str, str]:
    """Why the page with this key, the last of these packed tokens, is not found."""
    if not core.kv.caching:
        return "off", WORDS["off"]
    log, watch = core.cache.log, core.cache.watch
    if log is not None and (tiers := log.tiers_with(key)):
        return "tier", WORDS["tier"].format(tiers=", ".join(tiers))
    why = "unknown" if log is None or watch is None else _told(core, watch, name, packed, key)
    return why, WORDS[why]


def _told(core: EngineCore, watch: CacheWatch, name: tuple[str, str], packed: bytes, key: bytes) -> str:
    log = core.cache.log
    assert log is not None
    if watch.is_planned(key):
        return "computing"
    if log.has(POOL, key):
        return "kept"
    if (gone := watch.gone.get(key)) is not None:
        return gone
    others = [namespace_digest(core.model.fingerprint, *pair) for pair in watch.names if pair != name]
    if _under(others, packed, core.limits.page_size, lambda other: log.has(POOL, other)):
        return "salt"
    before = [namespace_digest(fingerprint, *name) for fingerprint in reversed(watch.fingerprints)]
    if _under(before, packed, core.limits.page_size, lambda other: other in watch.gone or bool(log.tiers_with(other))):
        return "weights"
    return "never"


def _under(namespaces: Iterable[bytes], packed: bytes, size: int, known: Callable[[bytes], bool]) -> bool:
    """Whether the last page of these tokens is known under one of these namespaces.

    Only some of those under which their first page is known are looked at: chains may be long, and names many.
    """
    first = packed[: 4 * size]
    likely = (namespace for namespace in namespaces if known(page_digests(namespace, first, size)[0]))
    return any(known(page_digests(namespace, packed, size)[-1]) for namespace in islice(likely, MOST_CHAINS))
