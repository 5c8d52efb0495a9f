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


class AutoOptions(PluginOptions):
    """Options of backend ``auto``."""

    order: tuple[str, ...] = Field(
        ("cpu", "flashinfer", "triton", "torch"), min_length=1, description="backends to try, the best first"
    )


class AutoAttention(Attention):
    """Takes the first backend of ``order`` that can serve this executor on this machine, and is that one from then on.

    Nothing is tried before ``prepare``, which says in words which one it is and why those before it are not.
    ``expect`` goes on to a later one where the model's layers need what the first cannot. What it ``provides`` is from
    then on what that one does.
    """

    name = "auto"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})
    Options = AutoOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._chosen: Attention | None = None
        self._left: list[str] = list(self.options.order)  # to try where the chosen one will not do
        self._against: list[str] = []
        self._words = ""
        self._sort = {"device": "cpu", "dtype": "float32"}
        self._layers: Sequence[AttentionLayer] = ()
        self._context: Context | None = None

    def prepare(self, *, device: str, dtype: str) -> str:
        """Choose. Raises ``ConfigError`` where none can, with the cause of each; ``PluginError`` for an unknown one."""
        if self._chosen is None:
            self._sort = {"device": device, "dtype": dtype}
            self._choose()
        return self._words

    def expect(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Choose again, if need be. Raises ``ConfigError`` where none can, with the cause of each."""
        self._layers = layers
        if self._chosen is not None:
            try:
                self._words = self._told(self._check(self._chosen)) or self._words
            except ConfigError as error:
                self._chosen.close()
                self._against.append(str(error))
                self._choose()
        return self._words or None

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
        """As the chosen backend does. Raises ``NotImplementedError`` where it cannot."""
        self._backend.plan_graph(batch)

    def compiled_batch(self) -> Any | None:
        """As the chosen backend's."""
        return self._backend.compiled_batch()

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

    def _choose(self) -> None:
        """The next one that can. Raises ``ConfigError`` where none is left."""
        self._chosen = None
        while self._left:
            name = self._left.pop(0)
            if name == self.name:
                raise ConfigError("attention auto cannot be among the backends that it tries")
            backend = make("attention", name)
            assert isinstance(backend, Attention)
            try:
                words = backend.prepare(**self._sort)
                words = self._check(backend) or words
            except (ConfigError, PluginError) as error:
                self._against.append(str(error))
                backend.close()
            else:
                self._words = self._told(words)
                self._chosen = backend
                vars(self)["provides"] = backend.provides
                if self._context is not None:
                    backend.start(self._context)
                return
        raise ConfigError(f"no attention backend of {', '.join(self.options.order)} can: {'; '.join(self._against)}")

    def _told(self, words: str | None) -> str:
        """What computes, and why those before it do not."""
        return "; ".join([words, *(f"not {cause}" for cause in self._against)]) if words else ""

    def _check(self, backend: Attention) -> str | None:
        """Tell it of the layers, if they are known. Raises ``ConfigError`` where it cannot compute them."""
        if not self._layers:
            return None
        missing = {need for layer in self._layers for need in layer.needs} - backend.provides
        if missing:
            raise ConfigError(f"attention {backend.name} does not provide {', '.join(sorted(missing))}")
        return backend.expect(self._layers)
