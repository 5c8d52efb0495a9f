"""``mooncake``: hand-off from engine to engine, the bytes written by Mooncake's transfer engine.

Source: Mooncake (the sender pushes), and its connectors in vLLM and SGLang. Its control plane is ours, the same as of
every connector that hands KV over.
"""

from __future__ import annotations

from pydantic import Field

from engine.plugins.connectors._handoff import HandOffConnector
from engine.plugins.connectors._handoff_options import StagedOptions
from engine.plugins.connectors._mooncake import MooncakeTransport
from engine.plugins.connectors._transport import Transport


class MooncakeConnector(HandOffConnector):
    """Hands KV from engine to engine by way of Mooncake. Needs pip install 'sixhooks[mooncake]'.

    The library listens on all interfaces of the host, whatever ``host`` says.
    """

    name = "mooncake"

    class Options(StagedOptions):
        reach: str = Field("", description="how peers reach this host's Mooncake; default: by the same host")

    def transport_factory(self) -> Transport:
        """The library is loaded here, so that it is known at once if it, or libibverbs, is missing."""
        return MooncakeTransport(self.options.reach or self.options.host)
