"""``local``: one engine computes prompts, another goes on with them; the standard library is all it needs.

On one host the receiver copies pages out of the sender's KV memory, which it maps to read; elsewhere they travel over
TCP. Either way the receiver alone writes to its memory, so that a transfer which it gives up is over when it says so.
"""

from __future__ import annotations

from pydantic import Field

from engine.core.memory import KVLayout
from engine.plugins.connectors._handoff import HandOffConnector
from engine.plugins.connectors._handoff_options import HandOffOptions
from engine.plugins.connectors._shared import SharedTransport


class LocalConnector(HandOffConnector):
    """Hands KV from engine to engine. Needs no library and no third process."""

    name = "local"
    streams = True

    class Options(HandOffOptions):
        """Those that every hand-off has, and one of its own."""

        shared: bool = Field(
            True, description="copy out of the KV memory of engines on this host, where that can be mapped; else: TCP"
        )

    def register(self, layout: KVLayout) -> None:
        """The memory that is shared is the layout's."""
        if self.options.shared:
            self._transport = SharedTransport(layout.shared)
        super().register(layout)
