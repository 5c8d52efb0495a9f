"""Every kernel of backend ``triton`` becomes machine code for two generations of GPUs, without any, and fits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = 99 * 1024  # bytes that a program may have on every GPU from sm_80 on; the large ones have 163 KiB and 227 KiB
REGISTERS = 255

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the kernels are interpreted in this process"),
]


@pytest.fixture(scope="module")
def kernels() -> Any:
    """The script that prints the table in docs/attention.md."""
    spec = importlib.util.spec_from_file_location("benchmark_kernels", ROOT / "benchmarks" / "triton_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fits(use: Any, spilled: int = 0) -> None:
    assert use.spilled <= spilled, use
    assert use.registers <= REGISTERS, use
    assert use.shared <= SHARED, use


# Each kind of item, type, page size and feature is compiled for each GPU, not all of them with each other: that is for
# the sweep below.
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        (80, {"dtype": "float16", "k_dim": 64, "v_dim": 64, "page": 16, "windowed": True}),
        (80, {"page": 1, "fp8": True, "wide": True}),
        (80, {"dtype": "float32", "group": 3, "kv_heads": 3, "k_dim": 64, "v_dim": 64, "page": 16, "wide": True}),
        (90, {"page": 1, "fp8": True}),
        (90, {"dtype": "float32", "group": 3, "kv_heads": 3, "k_dim": 64, "v_dim": 64, "page": 128}),
        (90, {"page": 16, "windowed": True, "capped": True, "wide": True}),
    ],
    ids=str,
)
def test_attention_compiles_and_fits(arch: int, changes: dict[str, Any], kernels: Any) -> None:
    fits(kernels.attend(kernels.LLAMA._replace(**changes), arch))


@pytest.mark.parametrize("arch", [80, 90])
def test_merging_and_writing_compile_and_fit(arch: int, kernels: Any) -> None:
    fits(kernels.merge(kernels.LLAMA, arch))
    fits(kernels.write(kernels.LLAMA._replace(fp8=arch == 80), arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_everything_compiles_and_fits(arch: int, kernels: Any) -> None:
    for use in kernels.everything([arch]):
        fits(use)


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_the_script_prints() -> None:
    """But for registers, which change with the compiler."""
    done = subprocess.run(
        [sys.executable, "benchmarks/triton_kernels.py", "--markdown"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    table = (ROOT / "docs" / "attention.md").read_text()
    for line in done.stdout.splitlines():
        kernel, variant, arch = line.split("|")[1:4]
        assert f"|{kernel}|{variant}|{arch}|" in table, line
