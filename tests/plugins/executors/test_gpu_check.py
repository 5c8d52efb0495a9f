"""The script that checks everything on a GPU: its logic, on the CPU, in sizes that show only that it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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


REPLAYABLE = """
from engine.plugins.attention.torch import TorchAttention

class Replayable(TorchAttention):
    name = "replayable"
    provides = TorchAttention.provides | {"attention:graphs"}

    def plan_graph(self, batch):
        self.plan_batch(batch)
"""


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_every_step_on_a_device_has_its_marks(
    benchmarks: None, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """One before its forward pass, planned in either way, and one behind it: by the clock here."""
    import _gpu_executor

    (tmp_path / "replaying.py").write_text(REPLAYABLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_gpu_executor.Spans, "_mark", lambda self: time.perf_counter())
    options = {"device": "cpu", "ahead": True, "graphs": graphs}
    with _gpu_executor.engine(str(tiny()), 3, overlap=True, attention="replaying:Replayable", **options) as core:
        spans = _gpu_executor.Spans(core, SimpleNamespace(on_gpu=True, device=None))
        _gpu_executor.said(core, 3, 6, 5)
    assert [tokens for tokens, _, _ in spans.steps][-3:] == [3, 3, 3]
    times = [mark for _, begin, end in spans.steps for mark in (begin, end)]
    assert times == sorted(times)
    assert len(set(times)) == 2 * len(spans.steps)


def test_the_benchmark_of_gaps_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "overlap.py"), "--quick"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    lines = [line.split()[:3] for line in done.stdout.splitlines()[1:]]
    assert lines == [["sim", who, loop] for who in ("unified", "radix") for loop in ("sync", "overlap")]
