"""``nixl``: hand-off from engine to engine, the bytes moved by NIXL (UCX): shared memory, TCP, or RDMA.

Source: vLLM's NIXL connector. Its control plane is ours, the same as of every connector that hands KV over.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from pydantic import Field

from engine.plugins.connectors._handoff import HandOffConnector
from engine.plugins.connectors._handoff_options import StagedOptions
from engine.plugins.connectors._nixl import NixlPushTransport, NixlTransport
from engine.plugins.connectors._transport import Transport


class NixlConnector(HandOffConnector):
    """Hands KV from engine to engine by way of NIXL. Needs pip install 'sixhooks[nixl]'."""

    name = "nixl"

    class Options(StagedOptions):
        style: Literal["pull", "push"] = Field(
            "pull", description="pull: the receiver reads; push: the sender writes; the same on both sides"
        )
        tls: str = Field("tcp,shm,self", description="what UCX may use; UCX_TLS of the environment goes first")
        devices: str = Field(
            "",
            description="network devices that UCX may use and listens on; default: lo where host is a loopback address,"
            " else all; UCX_NET_DEVICES of the environment goes first",
        )

    def transport_factory(self) -> Transport:
        """The library is loaded here, so that it is known at once if it is missing."""
        chosen: Any = self.options
        kind = NixlPushTransport if chosen.style == "push" else NixlTransport
        return kind(chosen.tls, chosen.devices or ("lo" if loopback(chosen.host) else ""))


def loopback(host: str) -> bool:
    """Whether a host's name or address means this host alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
