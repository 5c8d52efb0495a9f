"""One vector instead of tokens: what a request may ask for, and how partial sums become its answer.

Executors are asked for sums over the positions that a row computes, and keep nothing: what a request's rows have
brought so far is its own, so that a preemption drops it together with the KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from engine.core.checks import check_bool, kind
from engine.core.errors import InvalidRequest

PoolingKind = Literal["last", "mean"]
POOLING: tuple[PoolingKind, ...] = get_args(PoolingKind)
"""What an executor may say that it can compute (``Executor.pooling``)."""

Vector = NDArray[np.float32]
Total = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """A request for one vector: hidden states of the model's last layer, after its final norm, made into one.

    Args:
        kind: ``last``: that of the prompt's last token; ``mean``: the mean over all its tokens. The latter needs every
            state, and the prefix cache has none: it is not read.
        normalize: the vector has length 1.
    """

    kind: PoolingKind = "last"
    normalize: bool = True

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix can be used: none of its states is needed."""
        return self.kind == "last"

    def positions(self, start: int, upto: int, num_prompt: int) -> range:
        """Whose states a row brings the sum of that computes the prompt from ``start`` up to ``upto``: maybe none."""
        if self.kind == "mean":
            return range(start, upto)
        return range(upto - 1, upto) if upto == num_prompt else range(0)

    def answer(self, total: Total, num_prompt: int) -> bytes:
        """The vector that ``total``, the sum of what all rows brought, comes to: float32, little-endian."""
        vector = total / num_prompt if self.kind == "mean" else total
        if self.normalize and (length := np.linalg.norm(vector)):
            vector = vector / length
        return vector.astype("<f4").tobytes()


def check_pooling(pooling: Any, supported: tuple[str, ...]) -> None:
    """Raise ``InvalidRequest`` where it has a wrong type, or the executor cannot compute it."""
    if not isinstance(pooling, Pooling):
        raise InvalidRequest("pooling", f"must be Pooling, not {kind(pooling)}")
    check_bool("normalize", pooling.normalize)
    if pooling.kind not in POOLING:
        raise InvalidRequest("pooling", f"is {pooling.kind!r:.80}, must be one of {', '.join(POOLING)}")
    if pooling.kind not in supported:
        words = f"{pooling.kind}: {', '.join(supported)} are" if supported else "nothing of the kind is"
        raise InvalidRequest(
            "pooling", f"embeddings cannot be computed here ({words} supported by the executor)", code="unsupported"
        )
