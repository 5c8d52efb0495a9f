"""The named weights of a loaded model: to read, and to replace between two steps.

Names are transformers' own, also where a linear layer was prepacked and its plain weight is gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import ModelError, suggest
from engine.plugins.executors._packed import Packed


class Slot(NamedTuple):
    """One place where a weight lives."""

    shape: torch.Size
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]


class Weights:
    """All weights of a module, by name. A tied weight has one name, that of its first place, and is written to all.

    Attributes:
        names: every name, in the module's order; those of tied copies are left out.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._slots = dict(_slots(module))
        self._tied = _tied(module, self._slots)
        self.names = [name for name in self._slots if name not in self._tied]

    def read(self) -> dict[str, Tensor]:
        """A copy of every weight, in the host's memory."""
        return {name: self._slots[name].read().to("cpu", copy=True) for name in self.names}

    def checked(self, weights: Any) -> dict[str, Tensor]:
        """Copies of the given weights, in the model's own type. Raises ``ModelError`` where one does not fit."""
        if not isinstance(weights, Mapping):
            raise ModelError(f"weights are tensors by name, not {type(weights).__name__}")
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            own = str(self._tied.get(name, name))
            copy = self._fitting(name, own, tensor)
            if own in found and not torch.equal(found[own], copy):
                raise ModelError(f"weights {name!r} and {own!r} are one in this model, and they differ")
            found[own] = copy
        if not found:
            raise ModelError("no weights were given")
        return found

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Put these (``checked``) in place. Mutates the module."""
        for name, tensor in weights.items():
            self._slots[name].write(tensor)
        for copy, name in self._tied.items():
            if name in weights:
                self._slots[copy].write(weights[name])

    def _fitting(self, name: str, own: str, tensor: Any) -> Tensor:
        if own not in self._slots:
            near = suggest(str(name), get_close_matches(str(name), self._slots, 1) or self.names[:3])
            raise ModelError(f"the model has no weight {name!r}: {near}")
        if not isinstance(tensor, Tensor):
            raise ModelError(f"weight {name!r} is no tensor but {type(tensor).__name__}")
        if tensor.shape != self._slots[own].shape:
            raise ModelError(f"weight {name!r} is {list(tensor.shape)}, the model's {list(self._slots[own].shape)}")
        return tensor.detach().to("cpu", self._dtype, copy=True).contiguous()


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and every byte of the weights; their order does not matter."""
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        total.update(f"{len(name)}:{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def chained(before: str, weights: Mapping[str, Tensor]) -> str:
    """Digest of what was there before and the weights that came over it."""
    return hashlib.sha256(f"{len(before)}:{before}+{digest(weights)}".encode()).hexdigest()


def _slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(child, Packed):
            yield f"{prefix}weight", Slot(torch.Size((child.out_features, child.in_features)), child.plain, child.pack)
            if child.bias is not None:
                yield f"{prefix}bias", Slot(child.bias.shape, child.own_bias, child.set_bias)
        for name, parameter in child.named_parameters(recurse=False):
            yield f"{prefix}{name}", _parameter(parameter)


def _parameter(parameter: nn.Parameter) -> Slot:
    def write(tensor: Tensor) -> None:
        if parameter.device.type == "cpu":
            parameter.data = tensor  # not copied into: what is there may be a read-only map of a file
        else:
            parameter.data.copy_(tensor)  # graphs read it where it was when they were captured

    return Slot(parameter.shape, lambda: parameter.data, write)


def _tied(module: nn.Module, slots: Mapping[str, Slot]) -> dict[str, str]:
    """Name of the output embedding -> name of the input embedding, where they are one weight."""
    if not getattr(module.config.get_text_config(), "tie_word_embeddings", False):
        return {}
    places = {id(child): path for path, child in module.named_modules()}
    inner, outer = (
        f"{places[id(side)]}.weight" for side in (module.get_input_embeddings(), module.get_output_embeddings())
    )
    return {outer: inner} if outer in slots and inner in slots else {}
