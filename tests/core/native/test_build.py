"""Compiling on first use: once for each machine, and a reason wherever it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.core.native import NoKernels, build, built, cache_folder

linux = pytest.mark.skipif(os.name != "posix" or not Path("/proc").exists(), reason="the kernels are for Linux")
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "{version}" && exit 0
echo run >> {log}
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that says of each run, and an empty cache."""
    program = tmp_path / "c++"
    program.write_text(COMPILER.format(version="1", log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return program


def runs(compiler: Path) -> int:
    log = compiler.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


@linux
def test_it_is_compiled_once(compiler: Path) -> None:
    first = built()
    assert first.read_text() == "compiled\n"
    assert built() == first
    assert runs(compiler) == 1
    assert list(cache_folder().iterdir()) == [first]  # nothing is left lying about


@linux
def test_another_compiler_compiles_again(compiler: Path) -> None:
    first = built()
    compiler.write_text(COMPILER.format(version="2", log=compiler.parent / "log"))
    assert built() != first
    assert runs(compiler) == 2


@linux
def test_a_compiler_that_fails_is_named(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: error: no such thing" >&2\nexit 1\n')
    with pytest.raises(NoKernels, match=r"cannot compile the CPU kernels: x.cpp:1: error: no such thing"):
        built()
    assert list(cache_folder().iterdir()) == []


@linux
def test_a_compiler_that_is_not_there_is_named(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoKernels, match="CXX names 'no-such-compiler', which is no program"):
        built()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoKernels, match=r"none of g\+\+, c\+\+, clang\+\+ is installed"):
        built()


@linux
def test_a_cache_that_cannot_be_written_is_named(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiler))  # a file
    with pytest.raises(NoKernels, match="cannot be compiled"):
        built()


def test_elsewhere_than_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "darwin")
    with pytest.raises(NoKernels, match="for Linux; this is darwin"):
        built()
