"""What follows from options, machine and attention backend: on which device, in which types, launched in which way."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.core.errors import ConfigError
from engine.core.protocols import Attention
from engine.plugins.executors._device import device_of

if TYPE_CHECKING:
    from engine.plugins.executors.torch import TorchOptions

GRAPHS = "attention:graphs"


class Placement(NamedTuple):
    """Where and how a model computes."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    ahead: bool  # a step is launched before the host knows the tokens of the one in flight
    no_graphs: str = "the attention backend was not asked"  # why there are none; empty: there are

    @property
    def on_cpu(self) -> bool:
        """Whether it is the CPU."""
        return str(self.device.type) == "cpu"

    @property
    def launches(self) -> bool:
        """Whether steps are launched by a ``Launcher``, which resolves tokens on the device."""
        return self.ahead or not self.on_cpu

    @property
    def graphs(self) -> bool:
        """Whether decode steps are replayed as graphs."""
        return not self.no_graphs

    def marked(self, weights: str) -> str:
        """A fingerprint: of the weights, and of what else shapes KV."""
        return f"{weights}:{name_of(self.dtype)}" + (":kv-fp8" if self.kv_dtype is not self.dtype else "")


def name_of(dtype: torch.dtype) -> str:
    """``float32`` and so on."""
    return str(dtype).removeprefix("torch.")


def placement(options: TorchOptions) -> Placement:
    """What the options ask for. Raises ``ConfigError`` where that is not there, or does not fit together."""
    device = device_of(options.device)
    if options.memory_part is not None and device.type == "cpu":
        raise ConfigError("executor torch: memory_part is for CUDA devices; on the CPU kv_memory or num_pages says")
    if options.weights != "float32" and (device.type != "cpu" or options.dtype != "float32" or not options.compiled):
        raise ConfigError(
            f"executor torch: weights in {options.weights} need the compiled kernels, float32 and device cpu"
        )
    dtype: torch.dtype = getattr(torch, options.dtype)
    ahead = device.type != "cpu" if options.ahead is None else options.ahead
    return Placement(device, dtype, torch.float8_e4m3fn if options.kv_dtype == "fp8" else dtype, ahead)


def with_graphs(place: Placement, options: TorchOptions, attention: Attention) -> Placement:
    """The same, and whether decode steps are replayed as graphs by this backend, which was told of every layer.

    Raises:
        ConfigError: the options insist on graphs, and there can be none.
    """
    why = _no_graphs(place, options, attention)
    if why and options.graphs == "on":
        raise ConfigError(f"executor torch: there can be no graphs: {why}")
    return place._replace(no_graphs=why)


def _no_graphs(place: Placement, options: TorchOptions, attention: Attention) -> str:
    if options.graphs == "off":
        return "they are off"
    if place.on_cpu and options.graphs == "auto":
        return "device cpu has none"
    if not place.launches:
        return "on the CPU, steps that are not launched ahead (ahead) are not captured either"
    if GRAPHS not in attention.provides:
        return f"attention {attention.name!r} cannot be captured ({GRAPHS})"
    return ""
