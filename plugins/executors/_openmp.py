"""How OpenMP threads wait for each other. To be imported before torch: the library reads its settings only once.

By default GNU OpenMP's threads spin while they wait. A decode step has over a thousand short parallel regions; where
any other process wants a core (a client, the HTTP frontend, a test runner), spinning threads keep it from the very
thread that they wait for. Measured on two cores beside one busy process: a decode step of one row takes 1400 ms
spinning and 70 ms sleeping. A setting of the user's own is respected.
"""

from __future__ import annotations

import os
import sys


def wait_politely() -> bool:
    """Ask OpenMP to sleep where it waits. Mutates the environment; False where torch was imported before."""
    if "torch" in sys.modules:
        return False
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return True


wait_politely()
