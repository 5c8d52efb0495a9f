"""Decisions that once differed from vLLM's, found by ``fuzz_vllm.py`` on random workloads and made small."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.replay import vllm

HERE = Path(__file__).parent
FOUND = sorted((HERE / "data" / "vllm_found").glob("*.json"))


@pytest.mark.parametrize("file", FOUND, ids=[file.stem for file in FOUND])
def test_what_was_found_is_decided_as_vllm_decided_it(file):
    report = vllm.replay(json.loads(file.read_text()))
    assert report.equal, "\n".join([file.stem, *report.divergence.lines()])


def test_something_was_found():
    assert len(FOUND) >= 5


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_the_finder_says_what_it_needs():
    done = subprocess.run([sys.executable, HERE / "fuzz_vllm.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "vLLM 0.27.1 is needed here; found None" in done.stderr
