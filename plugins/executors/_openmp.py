"""How OpenMP threads wait for each other: imports torch so that they sleep. To be imported before torch is.

By default GNU OpenMP's threads spin while they wait. A decode step has over a thousand short parallel regions; where
any other process wants a core (a client, the HTTP frontend, a test runner), spinning threads keep it from the very
thread that they wait for. Measured on two cores beside one busy process: a decode step of one row takes 1400 ms
spinning and 70 ms sleeping. A setting of the user's own is respected, and the environment is left as it was: the
library reads it once, when it is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "OMP_WAIT_POLICY"


@contextmanager
def waiting_politely() -> Iterator[bool]:
    """Whatever OpenMP library is loaded inside sleeps where it waits; False where torch was imported before."""
    if "torch" in sys.modules or VARIABLE in os.environ:
        yield "torch" not in sys.modules
        return
    os.environ[VARIABLE] = "PASSIVE"
    try:
        yield True
    finally:
        del os.environ[VARIABLE]


with waiting_politely():
    import torch  # noqa: F401
