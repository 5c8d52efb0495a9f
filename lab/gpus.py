"""What well-known GPUs can do at most."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from engine.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GPU:
    """One device.

    Attributes:
        name: what it is called.
        flops: multiplications and additions a second of dense 16-bit matrix products.
        bandwidth: bytes a second that its memory is read at.
        memory: bytes of it.
        link: bytes a second to other devices of the machine, both directions together.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float


def _gpu(name: str, teraflops: float, gigabytes_a_second: float, gigabytes: float, link: float) -> GPU:
    return GPU(name, teraflops * 1e12, gigabytes_a_second * 1e9, gigabytes * 1e9, link * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", 65, 320, 16, 32),
        _gpu("v100", 125, 900, 32, 300),
        _gpu("a10", 125, 600, 24, 64),
        _gpu("l4", 121, 300, 24, 64),
        _gpu("l40s", 362, 864, 48, 64),
        _gpu("rtx-3090", 71, 936, 24, 64),
        _gpu("rtx-4090", 165, 1008, 24, 64),
        _gpu("a100-40g", 312, 1555, 40, 600),
        _gpu("a100", 312, 2039, 80, 600),
        _gpu("h100-pcie", 756, 2000, 80, 600),
        _gpu("h100", 989, 3350, 80, 900),
        _gpu("h200", 989, 4800, 141, 900),
        _gpu("b200", 2250, 8000, 180, 1800),
        _gpu("mi300x", 1307, 5300, 192, 896),
    )
}
"""By name. Source: the makers' data sheets (NVIDIA, AMD): dense BF16 tensor rates (FP16 for T4 and V100, FP32
accumulation for GeForce) without sparsity, memory bandwidth and size of the SXM variants where nothing else is said,
NVLink, Infinity Fabric or PCIe of one device. Peaks: what is reached of them is a parameter of the cost model."""


def gpu(name: str) -> GPU:
    """A device of the table. Raises ``ConfigError``, with what is near."""
    known = GPUS.get(name.lower().replace("_", "-"))
    if known is None:
        close = get_close_matches(name.lower(), list(GPUS), n=1)
        hint = f"did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"gpu {name!r} is not known: {hint or 'there are ' + ', '.join(GPUS)}")
    return known
