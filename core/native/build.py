"""Compiling the CPU kernels once for each machine: which compiler, which file, and why not."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.core.errors import EngineError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
COMPILERS = ("g++", "c++", "clang++")
COMPILE_SECONDS = 300.0


class NoKernels(EngineError):
    """The CPU kernels cannot be had here; the message says why, and what would help."""


def built() -> Path:
    """The compiled library for this machine; compiles it where that was not done yet, which takes some seconds.

    It is kept in the user's cache (``$XDG_CACHE_HOME`` or ``~/.cache``) under a digest of the sources, the compiler and
    the processor, so that a home shared by several machines is no trap.

    Raises:
        NoKernels: no compiler, or it failed.
    """
    if sys.platform != "linux":
        raise NoKernels(f"the CPU kernels are for Linux; this is {sys.platform}")
    compiler = find_compiler()
    target = cache_folder() / f"kernels-{_digest(compiler)}.so"
    if not target.is_file():
        _compile(compiler, target)
    return target


def find_compiler() -> str:
    """``$CXX`` or the first C++ compiler on the path. Raises ``NoKernels``."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    words = f"CXX names {wanted!r}, which is no program" if wanted else f"none of {', '.join(COMPILERS)} is installed"
    raise NoKernels(f"no C++ compiler: {words}")


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "sixhooks" / "native"


def instruction_set() -> str:
    """The widest vectors of this processor that the kernels use, in a word."""
    flags = _processor()
    for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX"), ("asimd", "NEON")):
        if flag in flags.split():
            return name
    return platform.machine()


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (compiler, version, *FLAGS, platform.machine(), _processor()):
        digest.update(f"{len(part)}:{part};".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, target: Path) -> None:
    """Compile beside the target and move there: whoever else does the same at the same time gets the same file."""
    log.info("compiling the CPU kernels with %s, once for this machine", compiler)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise NoKernels(f"{compiler} cannot compile the CPU kernels: {first}")
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"the CPU kernels cannot be compiled: {error}") from error
