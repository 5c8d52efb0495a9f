"""A tokenizer's pieces as the bytes that they stand for: one token alone may be a part of a character."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # how SentencePiece writes it


class Pieces:
    """Tells what the pieces of one vocabulary stand for, as its decoder says. Thread-safe.

    Args:
        backend: whose decoder is looked at: byte-level, or one of SentencePiece's (spaces as a sign, bytes as
            ``<0xF0>``). Pieces of other decoders stand for themselves.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        kinds = _kinds(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else set()
        self._byte_level = "ByteLevel" in kinds
        self._sentences = bool(kinds & {"Metaspace", "ByteFallback", "Replace"})

    def bytes_of(self, piece: str) -> bytes:
        """The bytes of a piece."""
        if self._byte_level and all(character in BYTES for character in piece):
            return bytes(BYTES[character] for character in piece)
        if self._sentences:
            found = BYTE.fullmatch(piece)
            return bytes([int(found[1], 16)]) if found else piece.replace(SPACE, " ").encode()
        return piece.encode()


def _kinds(decoder: Any) -> set[str]:
    """Types of a decoder and of all within it."""
    inner = [_kinds(one) for one in decoder.get("decoders", ())]
    return {decoder["type"]}.union(*inner)


def _alphabet() -> dict[str, int]:
    """GPT-2's way to write every byte as a printable character: those that are printable stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTES = _alphabet()
