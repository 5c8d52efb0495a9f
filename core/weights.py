"""Other weights under a running engine: no KV that the old ones computed is ever read again.

Two locks, each enough alone: everything cached is forgotten, and the model's fingerprint, which every key of cached
content begins with, is another one. The second is for content that lies elsewhere (tiers, other engines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from engine.core.errors import EngineError
from engine.core.identity import namespace_digest
from engine.core.protocols import ModelInfo
from engine.core.recovery import start_again
from engine.core.request import Request, State

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

WhileRunning = Literal["refuse", "recompute", "abort"]
WhileOpen = WhileRunning | Literal["finish"]
NewWeights = Mapping[str, Any] | str | PathLike[str] | Callable[[Mapping[str, Any]], Mapping[str, Any]]
ABORTED = "the weights were replaced"


def begun(core: EngineCore) -> list[Request]:
    """Requests that the weights in force have computed something of. Does not mutate."""
    return [request for request in core.requests.values() if request.state is State.RUNNING or request.num_output]


def check_running(core: EngineCore, running: WhileRunning) -> None:
    """Raise ``EngineError`` where the weights may not be replaced now, or ``running`` is none of its values."""
    if running not in ("refuse", "recompute", "abort"):
        raise EngineError(f"running={running!r}: what becomes of requests that run is refuse, recompute or abort")
    if running == "refuse" and (open_now := begun(core)):
        raise EngineError(
            f"{len(open_now)} requests have begun under the old weights: let them end first, or say what becomes of "
            "them (running='recompute' or 'abort')"
        )


def replace_all(core: EngineCore, new: Any, running: WhileRunning, version: str | None) -> str:
    """Have the executor replace its weights, with nothing in flight; returns the new fingerprint. Mutates.

    Raises as ``EngineCore.update_weights`` does.
    """
    if not core.exchange.drain():
        raise EngineError("KV of the old weights is being transferred: the weights cannot be replaced now")
    if not core.flight.overlap:
        core.flight.check_room()  # a plan made by hand
    core.land()
    check_running(core, running)
    try:
        fingerprint = core.executor.update_weights(new(core.executor.weights()) if callable(new) else new, version)
    except Exception:
        core.broken = core.executor.broken()
        raise
    for request in begun(core) if running == "abort" else ():
        core.abort(request.id, detail=ABORTED)
    return fingerprint


def renamed(core: EngineCore, fingerprint: str) -> ModelInfo:
    """Forget all KV there is and put every live request under the new fingerprint. Mutates.

    Requests that run lose their pages and queue again, at the front and in their order; their output stays.
    """
    for request in reversed(list(core.running)):
        start_again(core, request)
    core.kv.reset()
    core.cache.renamed(core.model.fingerprint)
    model = core.roster.model = replace(core.model, fingerprint=fingerprint)
    for request in core.requests.values():
        request.namespace = namespace_digest(fingerprint, request.adapter, request.salt)
        request.kv_state = None  # what a cache knew of it was under the old name
    return model
