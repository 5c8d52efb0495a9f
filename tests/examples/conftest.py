"""The examples, as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_python() -> Run:
    """Run Python in a process of its own, where the examples can be imported: ``run("-c", code)``, ``run(file)``."""

    def run(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES / "embedding"), **variables}
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=180
        )
        assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    return run
