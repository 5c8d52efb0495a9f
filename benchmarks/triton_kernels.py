"""What the compiler makes of the kernels of attention backend ``triton``. Needs no GPU.

    python benchmarks/triton_kernels.py [--archs 80,90] [--markdown]

Registers, spills, shared memory. Each variant is compiled as the backend would launch it; what a program needs is what
``ptxas -v`` says of it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.plugins.attention import _triton_kernels as kernels
from engine.plugins.attention._triton_blocks import Variant, attend_sizes, merge_sizes, write_sizes

ARCHS = (80, 90)
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
ALIGNED = 16  # bytes and numbers that pointers and strides are multiples of

# Layers like Llama 3's (4 query heads on each of 8 KV heads of 128), and what differs from them.
LLAMA = Variant("bfloat16", group=4, kv_heads=8, k_dim=128, v_dim=128, page=16)
VARIANTS = (
    LLAMA,
    LLAMA._replace(page=1),
    LLAMA._replace(page=128, fp8=True),
    LLAMA._replace(dtype="float16", k_dim=64, v_dim=64, windowed=True),
    LLAMA._replace(dtype="float16", group=3, kv_heads=3, k_dim=64, v_dim=64, fp8=True),
    LLAMA._replace(group=2, k_dim=256, v_dim=256, windowed=True, capped=True),
    LLAMA._replace(group=1, kv_heads=32, k_dim=80, v_dim=80),
    LLAMA._replace(dtype="float32", group=3, kv_heads=3, k_dim=64, v_dim=64),
    LLAMA._replace(wide=True),
    LLAMA._replace(page=1, wide=True),
    LLAMA._replace(page=128, fp8=True, wide=True),
    LLAMA._replace(dtype="float16", k_dim=64, v_dim=64, windowed=True, wide=True),
    LLAMA._replace(group=2, k_dim=256, v_dim=256, windowed=True, capped=True, wide=True),
    LLAMA._replace(dtype="float32", group=3, kv_heads=3, k_dim=64, v_dim=64, wide=True),
)


class Use(NamedTuple):
    """What a program of a kernel needs: registers a thread, bytes that spill, bytes of shared memory."""

    kernel: str
    variant: str
    arch: int
    registers: int
    spilled: int
    shared: int
    seconds: float


def named(variant: Variant) -> str:
    """In words."""
    words = [
        SHORT[variant.dtype], f"{variant.group}x{variant.kv_heads} heads of {variant.k_dim}", f"page {variant.page}",
        *(name for name in ("windowed", "capped", "fp8") if getattr(variant, name)),
    ]  # fmt: skip
    return ", ".join(words)


def attend(variant: Variant, arch: int) -> Use:
    """Compile the attention kernel."""
    sizes, options = attend_sizes(variant, False)
    own = SHORT[variant.dtype]
    pages = "*u8" if variant.fp8 else f"*{own}"
    types = {
        "query": f"*{own}", "keys": pages, "values": pages, "out": f"*{own}", "part": "*fp32", "weight": "*fp32",
        "pages": "*i32", "items": "*i32", "inner": "fp32", "outer": "fp32", "window": "i32", "q_token": "i32",
        "q_head": "i32",
    }  # fmt: skip
    what = "attend, wide" if variant.wide else "attend, narrow"
    return measured(what, named(variant), kernels.attend, types, sizes, options, arch)


def merge(variant: Variant, arch: int) -> Use:
    """Compile the kernel that merges parts."""
    types = {"out": f"*{SHORT[variant.dtype]}", "part": "*fp32", "weight": "*fp32", "merges": "*i32"}
    what = "merge, wide" if variant.wide else "merge, narrow"
    return measured(what, named(variant), kernels.merge, types, merge_sizes(variant), {}, arch)


def write(variant: Variant, arch: int) -> Use:
    """Compile the kernel that writes K and V."""
    own = SHORT[variant.dtype]
    pages = "*u8" if variant.fp8 else f"*{own}"
    types = {
        "new_keys": f"*{own}", "new_values": f"*{own}", "keys": pages, "values": pages, "slots": "*i64",
        "tokens": "i32", "k_token": "i32", "k_head": "i32", "v_token": "i32", "v_head": "i32",
    }  # fmt: skip
    sizes = write_sizes(variant.kv_heads, variant.k_dim, variant.v_dim, variant.fp8)
    return measured("write", named(variant), kernels.write, types, sizes, {}, arch)


def measured(
    kernel: str, variant: str, function: Any, types: dict[str, str], sizes: dict[str, Any], options: dict[str, int],
    arch: int,
) -> Use:  # fmt: skip
    """Compile one kernel to machine code and ask what it needs."""
    began = time.perf_counter()
    signature = {**types, **dict.fromkeys(sizes, "constexpr")}
    signature = {name: signature[name] for name in function.arg_names}
    places = {name: (at,) for at, name in enumerate(signature)}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name.endswith(("_token", "_head"))]
    source = ASTSource(
        function,
        signature,
        {places[name]: value for name, value in sizes.items()},
        {places[name]: [["tt.divisibility", ALIGNED]] for name in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**options, "enable_fp_fusion": True})
    assert built.asm["cubin"][:4] == b"\x7fELF"
    registers, spilled = needed(built.asm["ptx"], arch)
    return Use(kernel, variant, arch, registers, spilled, built.metadata.shared, time.perf_counter() - began)


def needed(ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it stores and loads because there are not enough."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        (target,) = re.findall(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", f"--gpu-name={target}"]
        done = subprocess.run(
            [*command, str(file), "-o", str(file.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return int(registers), int(stores) + int(loads)


def everything(archs: list[int]) -> Iterator[Use]:
    """All variants for all GPUs."""
    for arch in archs:
        yield from (attend(variant, arch) for variant in VARIANTS)
        yield from (merge(variant, arch) for variant in (LLAMA, LLAMA._replace(wide=True)))
        yield from (write(variant, arch) for variant in (LLAMA, LLAMA._replace(fp8=True)))


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=",".join(map(str, ARCHS)), help="compute capabilities, e.g. 80,90")
    parser.add_argument("--markdown", action="store_true", help="as a table of Markdown")
    args = parser.parse_args()
    uses = everything([int(arch) for arch in args.archs.split(",")])
    if args.markdown:
        print("| kernel | variant | for | registers | spilled bytes | shared memory, KiB |\n|---|---|---|---|---|---|")
    for use in uses:
        row = (use.kernel, use.variant, f"sm_{use.arch}", use.registers, use.spilled, f"{use.shared / 1024:.1f}")
        if args.markdown:
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
        else:
            print("{:<15} {:<52} {:<6} {:>4} registers {:>5} spilled {:>6} KiB shared".format(*row), flush=True)


if __name__ == "__main__":
    main()
