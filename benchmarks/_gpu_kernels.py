"""Attention backends on a device: their suite, their errors against float64, their times beside the device's peaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _gpu_report import Report

from engine.core import AttentionLayer, Batch, ConfigError, PluginError
from engine.core.protocols import Attention
from engine.core.registry import Registry, make
from engine.testing import AttentionSuite
from engine.testing.paged import PagedMemory, Row, Shape

CHOOSERS = ("auto", "split")  # they compute nothing themselves
FP8 = "float8_e4m3fn"
PAGE = 16

Able = dict[str, list[str]]
"""Backend -> the types that it computes here; ``bfloat16+fp8`` is bfloat16 over pages of fp8."""


def able(report: Report) -> Able:
    """Which backends compute what here. Says why others do not."""
    found: Able = {}
    names = [name for name in Registry().names("attention") if name not in CHOOSERS]
    for name in sorted(names, key=lambda name: name == "flashinfer"):  # last: it compiles for minutes at first
        why = ""
        for dtype in ("float32",) if report.tiny else ("float32", "float16", "bfloat16"):
            try:
                backend = prepared(name, report, dtype)
            except (ConfigError, PluginError, ImportError) as error:
                why = str(error)
                continue
            found.setdefault(name, []).append(dtype)
            if dtype == "bfloat16" and "attention:fp8-kv" in backend.provides:
                found[name].append("bfloat16+fp8")
            backend.close()
        if name not in found:
            report.leave(f"attention {name}: {why}")
    report.table(("backend", "computes here"), [(name, ", ".join(types)) for name, types in found.items()])
    report.check(bool(found), "there are attention backends for this device")
    return found


def prepared(name: str, report: Report, dtype: str, layer: AttentionLayer | None = None) -> Attention:
    """A backend that knows of the device and of its layers. Raises what they raise."""
    backend = make("attention", name)
    assert isinstance(backend, Attention)
    backend.prepare(device=str(report.device), dtype=dtype)
    if layer is not None:
        backend.expect([layer])
    return backend


def suites(report: Report, backends: Able) -> None:
    """Every rule of ``AttentionSuite`` for every backend."""
    rows = []
    for name, types in backends.items():
        plain = tuple(kind for kind in types if "+" not in kind)
        sizes: dict[str, Any] = {"plugin": name, "device": str(report.device), "dtypes": plain}
        if report.tiny:
            sizes |= {"page_sizes": (4,), "head_shapes": ((4, 2),), "head_dims": (16,), "long_context": 100}
        elif name == "flashinfer":
            sizes |= {"head_dims": (64, 128)}
        suite = type(f"On{name.title()}", (AttentionSuite,), sizes)
        held, broken, left = 0, [], 0
        for law in suite.laws():
            if report.late:
                left += 1
                continue
            try:
                law.check()
                held += 1
            except Exception as error:
                broken.append(f"{law.where}: {type(error).__name__}: {str(error)[:300]}")
        rows.append((name, ", ".join(plain), held, len(broken), left))
        for words in broken:
            report.check(False, f"attention {name}: {words}")
        if left:
            report.leave(f"attention {name}: {left} rules, the time is up")
    report.table(("backend", "types", "rules kept", "broken", "not tried"), rows)


def errors(report: Report, backends: Able) -> None:
    """Largest error of decode, prefill and mixed batches against dense attention in float64."""
    heads, kv_heads, dim, long = (4, 2, 16, 60) if report.tiny else (32, 8, 128, 4000)
    cases: Mapping[str, Sequence[Row]] = {
        "decode": [Row(long, 1), Row(7, 1), Row(long // 2, 1)],
        "prefill": [Row(0, long // 4), Row(long // 2, 33)],
        "mixed": [Row(long, 1), Row(0, long // 8), Row(90 % long, 1), Row(long // 3, 17)],
    }
    rows = []
    for name, kind in each(backends):
        if report.late:
            report.leave(f"errors of {name} in {kind}: the time is up")
            continue
        dtype, _, fp8 = kind.partition("+")
        more = {"kv_dtype": FP8} if fp8 else {}
        shape = Shape(heads=heads, kv_heads=kv_heads, head_dim=dim, page_size=PAGE, dtype=dtype,
                      device=str(report.device), **more)  # fmt: skip
        found = []
        for what, batch in cases.items():
            memory = PagedMemory(shape, batch)
            scale = dim**-0.5
            layer = AttentionLayer(heads=heads, kv_heads=kv_heads, k_dim=dim, v_dim=dim, scale=scale, **more)
            backend = prepared(name, report, dtype, layer)
            worst = float((memory.run(backend, scale).double() - memory.expected(scale)).abs().max())
            backend.close()
            found.append(f"{worst:.1e}")
            limit = 2 * AttentionSuite.tolerance[dtype] * (2 if fp8 else 1)
            if not worst <= limit:
                report.check(False, f"attention {name}, {kind}, {what}: off by {worst:.1e}; {limit:.0e} is allowed")
        rows.append((name, kind, *found))
    report.table(("backend", "type", *cases), rows)


def each(backends: Able) -> list[tuple[str, str]]:
    """Every backend with every type."""
    return [(name, kind) for name, types in backends.items() for kind in types]


class Bench:
    """Layers of KV memory, as many as do not fit into a cache, and batches over them."""

    def __init__(self, report: Report, dtype: str, kv_dtype: str, tokens: int) -> None:
        self.heads, self.kv_heads, self.dim = (4, 2, 16) if report.tiny else (32, 8, 128)
        self.pages, device = -(-tokens // PAGE) + 1, report.device
        one = 2 * self.pages * PAGE * self.kv_heads * self.dim * getattr(torch, kv_dtype).itemsize
        self.layers = []
        for _ in range(1 if report.tiny else max(1, min(8, (256 << 20) // one))):
            shape = (self.pages, PAGE, self.kv_heads, self.dim)
            content = (torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
            self.layers.append(tuple(side.to(getattr(torch, kv_dtype)) for side in content))
        self._kind, self._device = getattr(torch, dtype), device

    def batch(self, rows: int, start: int, count: int) -> Batch:
        """Rows of equal length, their pages in no order."""
        each = -(-(start + count) // PAGE)
        order = list(range(self.pages))
        random.Random(0).shuffle(order)
        tables = [[order[(row * each + at) % self.pages] for at in range(each)] for row in range(rows)]
        return Batch(starts=[start] * rows, counts=[count] * rows, pages=tables, page_size=PAGE, device=self._device)

    def work(self, backend: Attention, batch: Batch) -> Callable[[], object]:
        """Attention over the next layer, again and again."""
        backend.plan_batch(batch)
        query = torch.randn(batch.tokens, self.heads, self.dim, device=self._device, dtype=self._kind)
        turn = 0

        def once() -> object:
            nonlocal turn
            turn += 1
            return backend.attend(query, *self.layers[turn % len(self.layers)], self.dim**-0.5)

        return once


DECODES = ((1, 8192), (32, 2048), (128, 1024))  # rows, keys of each
PREFILLS = ((1, 0, 2048), (4, 0, 1024), (1, 4096, 512))  # rows, keys before, tokens


def times(report: Report, backends: Able, peaks: Mapping[str, float]) -> None:
    """Decode in GB/s of K and V read, prefill in TFLOP/s, as parts of what a copy and a product reach here."""
    decodes, prefills = (((2, 64),), ((1, 0, 32),)) if report.tiny else (DECODES, PREFILLS)
    rows = []
    for name, kind in each(backends):
        if report.late:
            report.leave(f"times of {name} in {kind}: the time is up")
            continue
        dtype, _, fp8 = kind.partition("+")
        bench = Bench(report, dtype, FP8 if fp8 else dtype, max(rows * keys for rows, keys in decodes) + 4096)
        layer = AttentionLayer(
            heads=bench.heads, kv_heads=bench.kv_heads, k_dim=bench.dim, v_dim=bench.dim, scale=bench.dim**-0.5,
            kv_dtype=FP8 if fp8 else "",
        )  # fmt: skip
        backend = prepared(name, report, dtype, layer)
        with torch.inference_mode():
            for batch, keys in decodes:
                took = report.seconds(bench.work(backend, bench.batch(batch, keys - 1, 1)), 20)
                item = bench.layers[0][0].element_size()
                rate = 2 * batch * keys * bench.kv_heads * bench.dim * item / took
                part = f"{rate / peaks['copy']:.0%} of copy"
                what = f"decode {batch} x {keys}"
                rows.append((name, kind, what, f"{took * 1e6:.0f} us", f"{rate / 1e9:.1f} GB/s", part))
            for batch, start, count in prefills:
                took = report.seconds(bench.work(backend, bench.batch(batch, start, count)), 10)
                seen = batch * (count * start + count * (count + 1) // 2)
                rate = 4 * bench.heads * bench.dim * seen / took
                part = f"{rate / peaks[dtype]:.0%} of matmul"
                what = f"prefill {batch} x {count}" + (f" after {start}" if start else "")
                rows.append((name, kind, what, f"{took * 1e6:.0f} us", f"{rate / 1e12:.2f} TFLOP/s", part))
        backend.close()
    report.table(("backend", "type", "batch", "time", "rate", "part of the peak"), rows)
