"""Which process an engine belongs to: threads, sockets and locks do not survive a fork."""

from __future__ import annotations

import os

from engine.core.errors import EngineDead


class Home:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """False in a process that was forked off."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ``EngineDead`` in a process that was forked off."""
        if not self.here:
            raise EngineDead(
                f"this engine belongs to process {self._pid}, and this is a fork of it (process {os.getpid()}): "
                "engines do not survive a fork. Make another one here, or start workers with 'spawn'"
            )
