"""What ``gpu_check.py`` prints and remembers, and how it takes time on a device."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Report:
    """Tables on standard output; what failed, and what was not tried.

    Attributes:
        device: where everything runs.
        tiny: sizes that only show that it runs.
        deadline: ``time.monotonic()`` after which nothing more is begun.
    """

    device: torch.device
    tiny: bool
    deadline: float
    failed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Whatever is raised inside is a failure, and the next section is tried all the same."""
        print(f"\n## {title}", flush=True)
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            self.check(False, f"{title}: {type(error).__name__} at {place}: {str(error).splitlines()[:1]}")
        print(f"({time.monotonic() - began:.1f} s)", flush=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Columns as wide as what is in them."""
        cells = [[str(cell) for cell in row] for row in [head, *rows]]
        widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
        for row in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def check(self, good: bool, words: str) -> None:
        """Say how a check ended. Mutates."""
        print(f"{'ok' if good else 'FAILED'}: {words}", flush=True)
        if not good:
            self.failed.append(words)

    def leave(self, words: str) -> None:
        """Something is not tried, and why. Mutates."""
        print(f"not tried: {words}", flush=True)
        self.left.append(words)

    def seconds(self, work: Callable[[], object], repeat: int) -> float:
        """Median time of ``work``, once everything is warm, as the device sees it."""
        for _ in range(2):
            work()
        if not self.on_gpu:
            return statistics.median(_timed(work) for _ in range(repeat))
        pairs = [(_event(), _event()) for _ in range(repeat)]
        torch.cuda._sleep(200_000_000)  # about 0.1 s: all is launched before the device begins, so no gap is the host's
        for begin, end in pairs:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)


def environment(report: Report) -> dict[str, float]:
    """What is here, and what it reaches: bytes/s of a copy, operations/s of a matrix product in each type."""
    import importlib.metadata

    rows = [("torch", f"{torch.__version__} (CUDA {torch.version.cuda})")]
    for name in ("triton", "flashinfer-python", "transformers", "sixhooks"):
        try:
            rows.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    if report.on_gpu:
        about = torch.cuda.get_device_properties(report.device)
        rows += [
            ("device", f"{about.name}, sm_{about.major}{about.minor}, {about.multi_processor_count} processors"),
            ("memory", f"{about.total_memory >> 20} MiB"),
        ]
    else:
        rows.append(("device", f"CPU, {torch.get_num_threads()} threads"))
    peaks = {"copy": _copy(report), **_products(report)}
    rows.append(("copy", f"{peaks['copy'] / 1e9:.1f} GB/s read and written"))
    rows += [(f"matmul {name}", f"{peaks[name] / 1e12:.2f} TFLOP/s") for name in peaks if name != "copy"]
    report.table(("what", "here"), rows)
    return peaks


def _copy(report: Report) -> float:
    size = 1 << (24 if report.tiny else 30)
    one, other = (torch.empty(size, dtype=torch.uint8, device=report.device) for _ in range(2))
    return 2 * size / report.seconds(lambda: other.copy_(one), 10)


def _products(report: Report) -> dict[str, float]:
    size, found = (128 if report.tiny else 8192), {}
    for name in ("float32",) if report.tiny else ("float32", "float16", "bfloat16"):
        one = torch.randn(size, size, device=report.device).to(getattr(torch, name))
        found[name] = 2 * size**3 / report.seconds(lambda one=one: one @ one, 10)
    return found
