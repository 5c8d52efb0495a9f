"""Random numbers that depend on nothing but a request's seed, its choice and the position of the token."""

from __future__ import annotations

import hashlib

from engine.core.request import Request


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), the same in every process, in any batch and any order of steps."""
    return (mix(seed, choice, position) >> 11) * 2.0**-53


def seed_of(request: Request, engine_seed: int) -> int:
    """The request's own seed, or one that follows from the engine's and the order of arrival. Does not mutate."""
    seed = request.params.seed
    return mix(engine_seed, request.arrival_index) if seed is None else seed


def mix(*numbers: int) -> int:
    """A 64-bit number that depends on all of ``numbers`` and is the same in every process."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
