"""The GGUF file format: metadata and tensors, read through a memory map.

The ``gguf`` package reads string arrays through one small array a string: 3.8 CPU-seconds for the default model's
vocabulary where this reader takes 0.2. Quantisation formats are the package's business (see ``gguf_quants``).
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError
from engine.core.models.gguf_quants import dequantize, storage

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SAMPLE_BYTES = 512


class TensorInfo(NamedTuple):
    """A tensor in the file: numpy shape (slowest dimension first), ggml type, offset in the file and bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file (versions 2 and 3, little endian). Reading is thread-safe once it is constructed.

    Attributes:
        path: the file.
        metadata: every key of the header, with plain Python values.
        tensors: name -> ``TensorInfo``.

    Raises:
        ModelError: not such a file, or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ModelError(f"{path}: the GGUF header is damaged or cut short ({error!r})") from error
        for name, info in self.tensors.items():
            if info.offset + info.nbytes > len(self._map):
                raise ModelError(f"{path}: cut short: tensor {name} ends at byte {info.offset + info.nbytes}")

    def close(self) -> None:
        """Unmap the file. Arrays returned before stay valid: they are copies."""
        self._map.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised to float32 in its own shape: a new array. Raises ``KeyError``, ``ModelError``."""
        info = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return dequantize(raw, info.kind).reshape(info.shape)

    def fingerprint(self) -> str:
        """Hex digest of the content, cheap (milliseconds): what differs in weights differs here, in practice.

        SHA-256 over the file's size, the whole header (metadata, tensor names, shapes, types, offsets) and the first,
        middle and last 512 bytes of every tensor. It is no proof against a forger.
        """
        digest = hashlib.sha256(len(self._map).to_bytes(8, "little"))
        digest.update(self._map[: self._header_end])
        for info in self.tensors.values():
            last = max(0, info.nbytes - _SAMPLE_BYTES)
            for start in (0, last // 2, last):
                at = info.offset + start
                digest.update(self._map[at : at + min(_SAMPLE_BYTES, info.nbytes)])
        return digest.hexdigest()

    def _read_header(self) -> None:
        magic, version, tensors, keys = struct.unpack_from("<4sIQQ", self._map, 0)
        if magic != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file (it starts with {magic!r})")
        if version not in VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (versions {VERSIONS} are)")
        self._at = 24
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        entries = [self._tensor_entry() for _ in range(tensors)]
        self._header_end = self._at
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self.tensors[name] = TensorInfo(shape, kind, base + offset, storage(shape, kind, name))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._map, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._map):
            raise IndexError("a string runs past the end of the file")
        return self._map[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("<I"), self._scalar("<Q")
            if inner in (_STRING, _ARRAY):
                return [self._value(inner) for _ in range(count)]
            layout = f"<{count}{_SCALARS[inner][1]}"
            values = struct.unpack_from(layout, self._map, self._at)
            self._at += struct.calcsize(layout)
            return list(values)
        if kind == 6:  # a float32: its shortest decimal form (1e-05), not the double next to it (9.999999747378752e-06)
            return float(str(np.float32(self._scalar("<f"))))
        return self._scalar(_SCALARS[kind])
