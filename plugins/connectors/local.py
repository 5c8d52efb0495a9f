"""``local``: one engine computes prompts, another goes on with them; pages travel over TCP, standard library only.

The receiver pulls: it alone writes to its KV memory, so that a transfer which it gives up is over when it says so.
"""

from __future__ import annotations

from engine.plugins.connectors._handoff import HandOffConnector
from engine.plugins.connectors._handoff_options import HandOffOptions


class LocalConnector(HandOffConnector):
    """Hands KV from engine to engine. Needs no library and no third process."""

    name = "local"
    streams = True

    class Options(HandOffOptions):
        """Those that every hand-off has."""
