"""An executor whose process is killed as soon as it has something to compute."""

from __future__ import annotations

import os
import signal
from typing import Any

from engine.plugins.executors.sim import SimExecutor


class Dies(SimExecutor):
    """As a machine out of memory ends it."""

    name = "dies"

    def execute(self, plan: Any) -> Any:
        """Once."""
        os.kill(os.getpid(), signal.SIGKILL)
