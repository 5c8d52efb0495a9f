"""The script that checks everything on a GPU: its logic, on the CPU, in sizes that show only that it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.testing import AttentionSuite

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "benchmarks" / "gpu_check.py")


@pytest.fixture
def benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_that_nothing_was_run() -> None:
    done = subprocess.run([sys.executable, SCRIPT], check=False, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "no GPU here: nothing was run\n")


def test_every_section_runs(benchmarks: None, tiny: Callable[..., Path], capsys: Any) -> None:
    import gpu_check

    report = gpu_check.Report(torch.device("cpu"), True, time.monotonic() + 600)
    assert gpu_check.run(report, str(tiny()), gpu_check.SECTIONS) == 0, report.failed
    out = capsys.readouterr().out
    assert out.count("## ") == 2 + len(gpu_check.SECTIONS)
    for words in (
        "torch in float32 says what the CPU says", "there are attention backends", "steps need", "decode 2 x 64",
        "GB/s", "rules kept", "tokens/s",
    ):  # fmt: skip
        assert words in out


def test_what_is_wrong_fails_and_what_is_late_is_said(
    benchmarks: None, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import _gpu_executor
    import gpu_check

    monkeypatch.setattr(AttentionSuite, "tolerance", {"float32": 1e-12})
    monkeypatch.setattr(_gpu_executor, "common", lambda one, other: 2)
    monkeypatch.setattr(_gpu_executor, "_in_use", lambda report, calls=[]: calls.append(1) or len(calls) << 30)
    report = gpu_check.Report(torch.device("cpu"), True, time.monotonic() + 600)
    assert gpu_check.run(report, str(tiny()), ("kernels", "tokens", "memory")) == 1
    failed = "\n".join(report.failed)
    for words in ("attention torch, float32, decode: off by", "torch in float32 says what", "MiB more than"):
        assert words in failed
    assert gpu_check.run(gpu_check.Report(torch.device("cpu"), True, 0.0), str(tiny()), ("times", "suites")) == 3
    assert "not tried: times of attention: the time is up" in capsys.readouterr().out


def test_the_benchmark_of_gaps_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--quick"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    lines = [line.split()[:3] for line in done.stdout.splitlines()[1:]]
    assert lines == [["sim", who, loop] for who in ("unified", "radix") for loop in ("sync", "overlap")]
