"""The attention backend that is the first of several to be able."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine.core.batch import AttentionLayer, Batch
from engine.core.errors import ConfigError, PluginError
from engine.core.protocols import Attention, Context, PluginOptions
from engine.core.registry import make

if TYPE_CHECKING:
    from torch import Tensor

KINDS = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})


class AutoOptions(PluginOptions):
    """Options of backend ``auto``."""

    order: tuple[str, ...] = Field(
        ("flashinfer", "triton", "cpu", "torch"), min_length=1, description="backends to try, the best first"
    )


class AutoAttention(Attention):
    """Takes the first backend of ``order`` that can serve this executor on this machine, and is that one from then on.

    Nothing is tried before ``prepare``, which says in words which one it is and why those before it are not. ``expect``
    goes on to the next where the model's layers are not for the first. What it provides is what the chosen one does.
    """

    name = "auto"
    provides = KINDS
    Options = AutoOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._left = list(self.options.order)  # to be tried, if the chosen one is not for the model
        self._against: list[str] = []
        self._where = ("cpu", "float32")
        self._chosen: Attention | None = None
        self._words = ""
        self._context: Context | None = None

    def prepare(self, *, device: str, dtype: str) -> str:
        """Choose. Raises ``ConfigError`` where none can, with the cause of each; ``PluginError`` for an unknown one."""
        if self._chosen is None:
            self._where = (device, dtype)
            self._choose(())
            if self._context is not None:
                self._backend.start(self._context)
        return self._said

    def expect(self, layers: Sequence[AttentionLayer]) -> str:
        """Go on to the first backend that can compute these layers. Raises ``ConfigError`` where none can."""
        if self._chosen is None:
            self._choose(layers)
        elif not self._takes(self._chosen, self._words, layers):
            self._chosen.close()
            self._chosen = None
            self._choose(layers)
        return self._said

    def start(self, context: Context) -> None:
        """Start the chosen backend, now or once it is chosen."""
        self._context = context
        if self._chosen is not None:
            self._chosen.start(context)

    def plan_batch(self, batch: Batch) -> None:
        """As the chosen backend does; where nobody prepared it, for float32 on the batch's device."""
        if self._chosen is None:
            self.prepare(device=str(batch.device), dtype="float32")
        self._backend.plan_batch(batch)

    def plan_graph(self, batch: Batch) -> None:
        """As the chosen backend does."""
        self._backend.plan_graph(batch)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """As the chosen backend does. Mutates the pages."""
        self._backend.write(keys, values, k_pages, v_pages)

    def attend(self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, **features: Any) -> Any:
        """As the chosen backend does."""
        return self._backend.attend(query, k_pages, v_pages, scale, **features)

    def close(self) -> None:
        """Close the chosen backend."""
        if self._chosen is not None:
            self._chosen.close()
        self._chosen = None

    @property
    def _backend(self) -> Attention:
        if self._chosen is None:
            raise RuntimeError("attention auto: prepare() or plan_batch() comes first")
        return self._chosen

    @property
    def _said(self) -> str:
        return "; ".join([self._words, *(f"not {cause}" for cause in self._against)])

    def _choose(self, layers: Sequence[AttentionLayer]) -> None:
        device, dtype = self._where
        while self._left:
            name = self._left.pop(0)
            if name == self.name:
                raise ConfigError("attention auto cannot be among the backends that it tries")
            backend = make("attention", name)
            assert isinstance(backend, Attention)
            try:
                words = backend.prepare(device=device, dtype=dtype)
            except (ConfigError, PluginError) as error:
                self._against.append(str(error))
            else:
                self._words = words
                if not layers or self._takes(backend, words, layers):
                    self._chosen = backend
                    self.provides = backend.provides  # type: ignore[misc]  # from now on
                    return
            backend.close()
        tried = ", ".join(self.options.order)
        raise ConfigError(f"no attention backend of {tried} can: {'; '.join(self._against)}")

    def _takes(self, backend: Attention, words: str, layers: Sequence[AttentionLayer]) -> bool:
        """Whether it computes these layers; the cause, if not, is kept."""
        lacking = frozenset[str]().union(*(layer.needs for layer in layers)) - backend.provides
        if lacking:
            what = ", ".join(sorted(name.removeprefix("attention:") for name in lacking))
            self._against.append(f"attention {backend.name}, which does not compute what the model has: {what}")
            return False
        try:
            self._words = backend.expect(layers) or words
        except ConfigError as error:
            self._against.append(str(error))
            return False
        return True
