"""A client's request, and what is made of it for either side. What the proxy need not know stays as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.core.errors import InvalidRequest
from engine.core.transfers import HINT
from engine.proxy.index import chain_of

RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
NOT_FOR_PREFILL = frozenset({"stream_options", "max_completion_tokens", "min_tokens", "best_of"})
PREFILL: Mapping[str, Any] = {"max_tokens": 1, "stream": False, "n": 1}
PREFILL_OF_RESPONSES: Mapping[str, Any] = {"max_output_tokens": 1, "stream": False}
PROMPTS = ("messages", "prompt", "input")


@dataclass(frozen=True)
class Wish:
    """A request.

    Attributes:
        path: of the endpoint.
        body: as it came.
        fields: the body's fields, each as JSON text.
        metadata: the client's own.
        chain: digests of the prompt's beginnings, for the index.
    """

    path: str
    body: bytes
    fields: Mapping[str, msgspec.Raw]
    metadata: Mapping[str, Any]
    chain: tuple[bytes, ...]

    @classmethod
    def parse(cls, path: str, body: bytes) -> Wish:
        """Raises ``InvalidRequest`` where it is no JSON object, or sets hints that are the proxy's to set."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(fields.get("metadata", b"null"), type=dict[str, Any] | None) or {}
        except msgspec.ValidationError as error:
            where = "metadata" if body.lstrip()[:1] == b"{" else "body"
            raise InvalidRequest(where, "must be a JSON object") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest("body", f"is not valid JSON: {error}") from error
        for name in metadata:
            if name.startswith(HINT):
                raise InvalidRequest(f"metadata.{name}", "is for the proxy to set: leave it out")
        salt = bytes(fields.get("cache_salt", b""))
        prompt = next((bytes(fields[name]) for name in PROMPTS if name in fields), b"")
        before = path.encode() + salt + bytes(fields.get("instructions", b""))
        return cls(path, body, fields, metadata, chain_of(before, prompt))

    def for_prefill(self, hints: Mapping[str, str]) -> bytes:
        """The same prompt for who computes it: one token, which nobody reads."""
        fields = {name: value for name, value in self.fields.items() if name not in NOT_FOR_PREFILL}
        one = PREFILL_OF_RESPONSES if self.path == RESPONSES else PREFILL
        return msgspec.json.encode({**fields, **one, "metadata": {**self.metadata, **hints}})

    def for_decode(self, hints: Mapping[str, str]) -> bytes:
        """The request for who answers it; as it came where there is nothing to tell."""
        if not hints:
            return self.body
        return msgspec.json.encode({**self.fields, "metadata": {**self.metadata, **hints}})
