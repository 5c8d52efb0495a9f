"""Attention backends: they read and write KV pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from engine.core.batch import AttentionLayer, Batch
from engine.core.protocols.plugin import Plugin


class Attention(Plugin, ABC):
    """An attention backend over paged KV. Tensors are torch's; the core never looks at them.

    It belongs to the executor that is given it, which starts and closes it: ``prepare``, ``expect``, ``start``, and
    then for each step ``plan_batch`` and, for each layer, ``write`` and ``attend``.

    Layout of one layer's K and of its V: ``[num_pages, page_size, kv_heads, head_dim]``.

    What it ``provides``: ``attention:prefill``, ``attention:decode`` and ``attention:mixed`` (kinds of batches),
    ``attention:window`` and ``attention:soft-cap`` (features of layers), ``attention:fp8-kv`` (pages of type
    ``float8_e4m3fn``, stored with scale 1), ``attention:graphs`` (``plan_graph``), ``attention:cascade`` (it reads
    ``Batch.shared`` pages once).
    """

    def prepare(self, *, device: str, dtype: str) -> str:
        """What K, V and queries will be: told at most once, before ``start``. Returns, in words, what will compute.

        May take seconds, to compile. Default: its name, for everything.

        Args:
            device: where they are, e.g. ``cpu``.
            dtype: their type, e.g. ``float32``.

        Raises:
            ConfigError: it cannot; says why, and what would help.
        """
        return self.name

    def expect(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Every attention layer of the model, in order: told at most once, after ``prepare`` and before ``start``.

        Returns, in words, what will compute, where that is not what ``prepare`` said. Default: nothing is done.

        Raises:
            ConfigError: it cannot compute one of them; says why.
        """
        return None

    @abstractmethod
    def plan_batch(self, batch: Batch) -> None:
        """Prepare for a batch (lengths, page tables): called once a step, before the first layer."""

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan_batch``, for a step whose kernels are, or will be, launched by a CUDA graph: ``attention:graphs``.

        All rows are decodes (``counts`` are 1); their number says which graph. The executor pads a batch with rows of
        one token on a page that nobody owns; those may share it. The first call with so many rows makes the index
        tensors of that graph, for rows of any length; later ones overwrite them in place, in stream order, without
        waiting for the device. What is captured between must hold: ``write`` and ``attend`` launch kernels and nothing
        else, and a graph computes what the latest ``plan_graph`` with its number of rows has told. Graphs are planned
        the largest first, after ``expect`` and ``start``; each is run once without capture before it is captured.

        Raises:
            NotImplementedError: this backend cannot (the default).
        """
        raise NotImplementedError(f"attention {self.name} cannot be captured in graphs")

    def compiled_batch(self) -> Any | None:
        """What ``plan_batch`` has laid out, as ``engine.core.native.PagedBatch``: where ``write`` and ``attend`` do
        nothing but call the compiled kernels ``write`` and ``attend`` with it.

        An executor may then run all layers in one call of those kernels instead. It stays as it is until the next
        ``plan_batch``. Default: ``None``, and ``write`` and ``attend`` are called for each layer.
        """
        return None

    @abstractmethod
    def write(self, keys: Any, values: Any, k_pages: Any, v_pages: Any) -> None:
        """Store the batch's new K and V, each ``[tokens, kv_heads, head_dim]``, into the pages of a layer."""

    @abstractmethod
    def attend(
        self,
        query: Any,
        k_pages: Any,
        v_pages: Any,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Any:
        """Causal attention of ``query [tokens, heads, head_dim]`` over the pages: ``[tokens, heads, v_head_dim]`` back.

        Args:
            scale: what scores are multiplied by.
            window: keys that a query sees at most, itself included. Given only to those who provide
                ``attention:window``, for layers that have one.
            soft_cap: scores become ``soft_cap * tanh(score * scale / soft_cap)``. Given only to those who provide
                ``attention:soft-cap``, for layers that have one.
        """
