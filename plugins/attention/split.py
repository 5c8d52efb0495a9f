"""Two backends for one model: decodes go to one, everything else to the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from engine.core.batch import AttentionLayer, Batch
from engine.core.errors import ConfigError
from engine.core.protocols import Attention, Context, PluginOptions
from engine.core.registry import make

if TYPE_CHECKING:
    from torch import Tensor

OF_DECODE = frozenset({"attention:graphs", "attention:cascade"})  # what concerns decodes alone


class SplitOptions(PluginOptions):
    """Options of backend ``split``."""

    prefill: str = Field("auto", description="backend for rows of several tokens")
    decode: str = Field("auto", description="backend for rows of one token")
    prefill_options: Mapping[str, Any] = Field({}, description="its options, e.g. cascade=512,mixed=batch")
    decode_options: Mapping[str, Any] = Field({}, description="its options")


class Side(NamedTuple):
    """A backend and its share of the step: tokens of the flattened batch, a slice or their numbers."""

    backend: Attention
    tokens: Any


class SplitAttention(Attention):
    """Rows of one token are computed by backend ``decode``, all others by backend ``prefill``.

    Each writes the K and V of its rows, all before any of them attends; a step of one kind is one backend's alone.
    Provides what both do, and of graphs and cascades what the decode backend does.
    """

    name = "split"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})
    Options = SplitOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._prefill = self._made("prefill", self.options.prefill, self.options.prefill_options)
        self._decode = self._made("decode", self.options.decode, self.options.decode_options)
        self._sides: list[Side] = []

    def prepare(self, *, device: str, dtype: str) -> str:
        """Prepare both. Raises ``ConfigError`` where one of them cannot, saying which."""
        said = [backend.prepare(device=device, dtype=dtype) for backend in self._both]
        return self._words(said)

    def expect(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Tell both. Raises ``ConfigError`` where one of them cannot."""
        said = [backend.expect(layers) or backend.name for backend in self._both]
        vars(self)["provides"] = self._provided()  # of ``auto`` it is known now
        return self._words(said)

    def start(self, context: Context) -> None:
        """Start both."""
        for backend in self._both:
            backend.start(context)

    def plan_batch(self, batch: Batch) -> None:
        """Lay out each backend's rows."""
        decodes = [row for row, count in enumerate(batch.counts) if count == 1]
        if len(decodes) in (0, len(batch.counts)):
            self._whole(self._decode if decodes else self._prefill).plan_batch(batch)
            return
        prefills = [row for row, count in enumerate(batch.counts) if count != 1]
        firsts = [0, *accumulate(batch.counts)]
        self._sides = []
        for backend, rows in ((self._prefill, prefills), (self._decode, decodes)):
            backend.plan_batch(_rows(batch, rows))
            self._sides.append(Side(backend, _tokens(firsts, rows, batch.device)))

    def plan_graph(self, batch: Batch) -> None:
        """As the decode backend does."""
        self._whole(self._decode).plan_graph(batch)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where ``plan_batch`` says. Mutates the pages."""
        for backend, tokens in self._planned:
            backend.write(keys[tokens], values[tokens], k_pages, v_pages)

    def attend(self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, **features: Any) -> Any:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        sides = self._planned
        if len(sides) == 1:
            return sides[0].backend.attend(query, k_pages, v_pages, scale, **features)
        out = query.new_empty(*query.shape[:2], v_pages.shape[3])
        for backend, tokens in sides:
            out[tokens] = backend.attend(query[tokens], k_pages, v_pages, scale, **features)
        return out

    def close(self) -> None:
        """Close both."""
        self._sides = []
        for backend in self._both:
            backend.close()

    @property
    def _both(self) -> tuple[Attention, Attention]:
        return self._prefill, self._decode

    @property
    def _planned(self) -> list[Side]:
        if not self._sides:
            raise RuntimeError("attention split: plan_batch() comes first")
        return self._sides

    def _whole(self, backend: Attention) -> Attention:
        """The step is this backend's alone."""
        self._sides = [Side(backend, slice(None))]
        return backend

    def _made(self, kind: str, name: str, options: Mapping[str, Any]) -> Attention:
        if name == self.name:
            raise ConfigError("attention split cannot be one of its own backends")
        backend = make("attention", name, options)
        assert isinstance(backend, Attention)
        kinds = {offer for offer in backend.provides if offer in SplitAttention.provides}
        if kinds and f"attention:{kind}" not in kinds:
            raise ConfigError(f"attention {name} does not compute batches of kind {kind}")
        return backend

    def _provided(self) -> frozenset[str]:
        prefill, decode = (backend.provides for backend in self._both)
        return SplitAttention.provides | (prefill & decode) | (decode & OF_DECODE)

    def _words(self, said: Sequence[str]) -> str:
        return f"prefill by {said[0]}; decode by {said[1]}"


def _rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """A batch of some of its rows."""
    return replace(
        batch,
        starts=[batch.starts[row] for row in rows],
        counts=[batch.counts[row] for row in rows],
        pages=[batch.pages[row] for row in rows],
    )


def _tokens(firsts: Sequence[int], rows: Sequence[int], device: Any) -> Any:
    """Where their tokens lie in the flattened batch."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(firsts[rows[0]], firsts[rows[-1] + 1])
    import torch

    places = [at for row in rows for at in range(firsts[row], firsts[row + 1])]
    return torch.tensor(places, dtype=torch.long, device=device)
