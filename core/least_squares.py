"""Least squares without negative parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nnls(a: Floats, b: Floats) -> Floats:
    """The x without negative numbers for which ``|a x - b|`` is least; ``a`` is ``[m, n]``, ``b`` ``[m]``.

    Source: the active-set algorithm of Lawson and Hanson (1974). Columns are scaled to length 1 first.
    """
    size = np.linalg.norm(a, axis=0)
    size[size == 0] = 1.0
    a = a / size
    gram, target = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    active = np.zeros(a.shape[1], bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(target).max()))
    for _ in range(30 * a.shape[1]):
        gradient = target - gram @ x
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while True:
            trial = np.zeros_like(x)
            places = np.flatnonzero(active)
            trial[places] = np.linalg.lstsq(a[:, places], b, rcond=None)[0]
            if trial[places].min() > 0:
                break
            bad = active & (trial <= 0)
            step = float((x[bad] / np.maximum(x[bad] - trial[bad], 1e-300)).min())
            x += step * (trial - x)
            active &= x > 1e-14
            x[~active] = 0.0
            if not active.any():
                trial = x
                break
        x = trial
    found: Floats = x / size
    return found
