"""Options that all connectors have which hand KV from engine to engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from engine.core.config import Size
from engine.core.protocols import PluginOptions


class HandOffOptions(PluginOptions):
    """Of every one of them."""

    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="prefill: only leases what it computes; decode: only fetches, and listens nowhere"
    )
    host: str = Field("127.0.0.1", description="address to listen on; other engines must be trusted, see the docs")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free one, see `address`")
    engine: str = Field("", description="what peers call this engine; default: its process id")
    token: SecretStr = Field(SecretStr(""), description="what engines must know to talk to each other; empty: nothing")
    peers: tuple[str, ...] = Field(
        ("127.0.0.1", "localhost", "::1"), description="hosts that a request's kv_from may name; *: any"
    )
    lease: Literal["asked", "all"] = Field(
        "asked", description="lease what was computed for requests with kv_role=prefill, or for all"
    )
    lease_seconds: float = Field(10.0, gt=0, description="seconds that pages wait to be fetched")
    saving_share: float = Field(0.5, gt=0, le=1, description="most of the KV pool that may be leased")
    patience: float = Field(5.0, gt=0, description="seconds that a request may be kept waiting for its prefix")
    linger: float = Field(0.2, ge=0, description="seconds that a look-up waits for pages not computed yet")
    checksum: bool = Field(True, description="compare the bytes that come with a checksum; False: trust TCP's own")
    min_tokens: int = Field(0, ge=0, description="fetch only where it gives so many tokens more than are cached")


class StagedOptions(HandOffOptions):
    """Of those whose library may write late: bytes come into a staging area first."""

    staging: Size = Field("64MiB", description="memory that the library writes to; at least a page of KV")
