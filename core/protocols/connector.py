"""Connectors: KV that moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from engine.core.errors import ConfigError
from engine.core.protocols.plugin import Plugin

if TYPE_CHECKING:
    from engine.core.memory import KVLayout


class Connector(Plugin):
    """Moves KV between engines and tiers: answers ``transfer_kv``, at once: the work is done in threads of its own.

    Class attributes:
        loads: it may have content to give: ``probe`` and ``pull`` transfers are for it.
        saves: it keeps content: ``push`` transfers are for it.
        patience: seconds from a request's arrival for which it may be kept waiting for what comes in.
        min_tokens: fewer than so many tokens more than are cached here are not worth a transfer.
        saving_share: at most this part of the pool is fenced for what it saves; what is beyond is not handed to it.
        holds: what a probe finds is held for it elsewhere, so a ``cancel`` of the probe tells when it is not wanted.
        notice: what a store calls, from any thread, with the keys that it keeps from now on or no longer keeps;
            ``None`` where nobody listens. Set by the core, before ``register``.
    """

    loads: bool = False
    saves: bool = False
    patience: float = 5.0
    min_tokens: int = 0
    saving_share: float = 0.25
    holds: bool = False
    notice: Callable[[Literal["stored", "removed"], Sequence[bytes]], None] | None = None

    def register(self, layout: KVLayout) -> None:
        """Where KV memory lies. Called once, after ``start``, of a connector that loads or saves.

        The memory stays where it is until ``close``. Raise ``ConfigError`` where it cannot be worked with.
        """

    def compose(self, others: Sequence[Connector]) -> Sequence[Connector]:
        """Those of the other selected connectors that it drives itself: it starts and closes them, and the core knows
        them no more. Called once, first of all. None by default. Raise ``ConfigError`` where they do not fit."""
        return ()

    def describe(self) -> Mapping[str, Any]:
        """What others must know of it, e.g. where it listens: part of ``EngineCore.describe``. Called after
        ``register``. Nothing by default."""
        return {}

    def stats(self) -> Mapping[str, int | float]:
        """Numbers of its own, for whoever watches: ``EngineCore.stats`` names them ``connector_NAME_…``. None by
        default."""
        return {}

    def clear(self) -> int:
        """Forget all that it keeps; returns the number of pages. Called on the engine's thread: at once.

        Raises:
            ConfigError: it keeps nothing that could be forgotten, or what others use, too (the default).
        """
        raise ConfigError(f"connector {self.name} has nothing that can be cleared from here")
