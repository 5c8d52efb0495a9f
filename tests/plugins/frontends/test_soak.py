"""Many streams, half of them cut: the books of both sides agree, and every page comes back (cases B48, B49, B51)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[3] / "benchmarks" / "soak.py"


def soak(tmp_path: Path, *flags: str, timeout: float) -> dict[str, Any]:
    file = tmp_path / "soak.json"
    done = subprocess.run([sys.executable, str(SOAK), "--json", str(file), *flags], capture_output=True, text=True,
                          timeout=timeout)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_half_of_many_streams_are_cut(tmp_path: Path) -> None:
    found = soak(tmp_path, "--seconds", "6", "--streams", "100", timeout=200)
    assert found["faults"] == []
    assert found["pages_in_use"] == 0
    assert found["cut"] > 100
    assert found["completed"] > 100


def flood(tmp_path: Path, what: str, *flags: str, timeout: float) -> dict[str, Any]:
    file = tmp_path / "flood.json"
    done = subprocess.run([sys.executable, str(SOAK.with_name("flood.py")), what, "--json", str(file), *flags],
                          capture_output=True, text=True, timeout=timeout)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_requests_leave_no_objects_behind(tmp_path: Path) -> None:
    found = flood(tmp_path, "objects", "--requests", "2000", timeout=200)
    assert found["statuses"] == {"200": 2202}


def test_what_there_is_no_room_for_is_told_so(tmp_path: Path) -> None:
    found = flood(tmp_path, "overload", "--seconds", "4", "--max-slope", "1000", timeout=200)
    assert found["statuses"].keys() == {"200", "429"}


@pytest.mark.slow
def test_memory_is_flat_after_two_hundred_thousand_requests_and_under_ten_times_the_load(tmp_path: Path) -> None:
    flood(tmp_path, "tiny", timeout=3600)
    flood(tmp_path, "overload", timeout=1200)


@pytest.mark.slow
def test_memory_is_flat_after_ten_minutes(tmp_path: Path) -> None:
    found = soak(tmp_path, "--seconds", "600", "--streams", "200", "--max-slope", "1.0", timeout=1200)
    assert found["faults"] == []
