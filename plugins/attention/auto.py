"""The attention backend that is the first of several to be able."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine.core.batch import Batch
from engine.core.errors import ConfigError, PluginError
from engine.core.protocols import Attention, Context, PluginOptions
from engine.core.registry import make

if TYPE_CHECKING:
    from torch import Tensor


class AutoOptions(PluginOptions):
    """Options of backend ``auto``."""

    order: tuple[str, ...] = Field(("cpu", "torch"), min_length=1, description="backends to try, the best first")


class AutoAttention(Attention):
    """Takes the first backend of ``order`` that can serve this executor on this machine, and is that one from then on.

    Nothing is tried before ``prepare``, which says in words which one it is and why those before it are not.
    """

    name = "auto"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})
    Options = AutoOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._chosen: Attention | None = None
        self._words = ""
        self._context: Context | None = None

    def prepare(self, *, device: str, dtype: str) -> str:
        """Choose. Raises ``ConfigError`` where none can, with the cause of each; ``PluginError`` for an unknown one."""
        if self._chosen is None:
            self._chosen, self._words = self._choose(device, dtype)
            if self._context is not None:
                self._chosen.start(self._context)
        return self._words

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

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """As the chosen backend does. Mutates the pages."""
        self._backend.write(keys, values, k_pages, v_pages)

    def attend(self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Any:
        """As the chosen backend does."""
        return self._backend.attend(query, k_pages, v_pages, scale)

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

    def _choose(self, device: str, dtype: str) -> tuple[Attention, str]:
        against: list[str] = []
        for name in self.options.order:
            if name == self.name:
                raise ConfigError("attention auto cannot be among the backends that it tries")
            backend = make("attention", name)
            assert isinstance(backend, Attention)
            try:
                words = backend.prepare(device=device, dtype=dtype)
            except (ConfigError, PluginError) as error:
                against.append(str(error))
                backend.close()
            else:
                return backend, "; ".join([words, *(f"not {cause}" for cause in against)])
        raise ConfigError(f"no attention backend of {', '.join(self.options.order)} can: {'; '.join(against)}")
