"""How long a step takes: computed from the sizes of model and GPU (a roofline), or fitted to measured steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.core.errors import ConfigError
from engine.lab.gpus import GPU
from engine.lab.shapes import ModelShape
from engine.lab.work import StepWork

KIND = "sixhooks-step-cost-1"


class CostModel(Protocol):
    """Says how long a step takes on the device."""

    def seconds(self, work: StepWork) -> float:
        """Of one step. Does not mutate."""

    def describe(self) -> Mapping[str, Any]:
        """What it was made from, as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Each part of a step takes as long as its products or the bytes that it reads, whichever is longer.

    Source: the roofline model (Williams et al., 2009), with the parts that LLM-Viewer (Yuan et al., 2024) and Vidur
    (Agrawal et al., MLSys 2024) tell apart: linear layers, attention, the output embedding, and all-reduces between
    devices. Weights are read once a step, KV once a row.

    Attributes:
        degree: devices that share every layer (tensor parallelism).
        compute_share, bandwidth_share: parts of the device's peaks that kernels reach.
        weight_bytes, kv_bytes: bytes of a number. Below two, weights are multiplied at the 16-bit rate all the same.
        overhead: seconds that a step takes on the device whatever it computes.
        reduce_latency: seconds of an all-reduce of nothing; there are two a layer.
    """

    model: ModelShape
    gpu: GPU
    degree: int = 1
    compute_share: float = 0.7
    bandwidth_share: float = 0.8
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    overhead: float = 0.0005
    reduce_latency: float = 10e-6

    def seconds(self, work: StepWork) -> float:
        """The parts one after the other."""
        if not work.tokens:
            return 0.0
        return self.overhead + sum(self.parts(work).values())

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds of each part of a step. Does not mutate."""
        model = self.model
        read = model.fixed_weights + model.experts_read(work.tokens) * model.expert_weights
        scores = 4 * model.layers * model.heads * model.head_dim * work.scores
        return {
            "linear": self._longer(2.0 * model.weights_a_token * work.tokens, read * self.weight_bytes),
            "attention": self._longer(float(scores), work.context * model.kv_numbers * self.kv_bytes),
            "output": self._longer(2.0 * model.output_weights * work.samples, model.output_weights * self.weight_bytes)
            if work.samples
            else 0.0,
            "reduce": self._reduce(work.tokens),
        }

    def _longer(self, flops: float, read: float) -> float:
        compute = flops / (self.degree * self.gpu.flops * self.compute_share)
        return max(compute, read / (self.degree * self.gpu.bandwidth * self.bandwidth_share))

    def _reduce(self, tokens: int) -> float:
        """Two rings a layer: every device sends and receives nearly all activations twice, in halves of its link."""
        if self.degree == 1:
            return 0.0
        moved = 2 * (self.degree - 1) / self.degree * tokens * self.model.hidden * 2.0
        one = self.reduce_latency + moved / (self.gpu.link / 2 * self.bandwidth_share)
        return 2 * self.model.layers * one

    def describe(self) -> Mapping[str, Any]:
        """All of it."""
        return {"kind": "roofline", **asdict(self)}


FEATURES = ("step", "prefill_tokens", "decode_rows", "context", "scores", "samples", "steep_tokens")
"""What a fitted cost is a sum of: a constant, and what ``StepWork`` counts; ``steep_tokens`` are those beyond
``Fitted.knee``: below it a device reads weights, above it it computes."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Seconds that each feature adds. Made by ``engine.lab.fitting``.

    Attributes:
        weights: feature -> seconds; those that are missing add nothing.
        knee: tokens of a step from which on each costs more.
        about: where it comes from, and how far off it was.
    """

    weights: Mapping[str, float]
    knee: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    def seconds(self, work: StepWork) -> float:
        """A sum."""
        if not work.tokens:
            return 0.0
        get = self.weights.get
        return (
            get("step", 0.0)
            + get("prefill_tokens", 0.0) * work.prefill_tokens
            + get("decode_rows", 0.0) * work.decode_rows
            + get("context", 0.0) * work.context
            + get("scores", 0.0) * work.scores
            + get("samples", 0.0) * work.samples
            + get("steep_tokens", 0.0) * max(0, work.tokens - self.knee)
        )

    def describe(self) -> Mapping[str, Any]:
        """All of it."""
        return {"kind": "fitted", "weights": dict(self.weights), "knee": self.knee, "about": dict(self.about)}

    def save(self, path: Path) -> None:
        """Write it to a file, as JSON."""
        data = {"kind": KIND, "weights": dict(self.weights), "knee": self.knee, "about": dict(self.about)}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def load_fitted(path: Path) -> Fitted:
    """What ``Fitted.save`` wrote. Raises ``ConfigError``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["kind"] != KIND:
            raise ValueError(f"its kind is {data['kind']!r}, not {KIND!r}")
        weights = {str(name): float(value) for name, value in data["weights"].items()}
        if unknown := sorted(set(weights) - set(FEATURES)):
            raise ValueError(f"there is no feature {unknown[0]!r}")
        return Fitted(weights, int(data["knee"]), dict(data["about"]))
    except OSError as error:
        raise ConfigError(f"cost {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"cost {path}: not a fitted cost: {type(error).__name__}: {error}") from error
