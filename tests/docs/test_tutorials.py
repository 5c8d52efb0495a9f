"""The tutorials do what they say: each is followed from top to bottom, in an empty folder and its own environment.

Blocks, in the order of the page:

* ``{code-block}`` with ``:caption: PATH`` is written to that file; ``PATH, continued`` is added to its end;
* ``console`` is typed into one shell: ``$ command``, and below it what it prints, where ``…`` stands for anything. A
  command must succeed, unless the next one is ``echo $?``;
* ``python`` is run;
* ``text`` is a picture, ``toml`` and ``sh`` without a caption are examples: they are left alone.

Ports 8000 to 8099 are free ones, others each time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = [
    *sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.name != "index.md"),
    ROOT / "docs" / "disaggregation.md",
]
FENCE = re.compile(r"^```(?P<kind>\S[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
OTHER = ("text", "toml", "sh")
PORT = re.compile(r"\b80\d\d\b")
LIMIT = 60  # seconds a command may take
TOO_SLOW = "BROKEN     A step costs at most"
SCRIPTS = {"engine": "engine.cli:main", "pip": "pip._internal.cli.main:main", "pytest": "pytest:main"}


class Block(NamedTuple):
    """One fenced block. ``file`` is what it is written to, if it is."""

    kind: str
    file: str
    more: bool
    body: str


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page. Raises ``AssertionError`` at one that would not be tried."""
    for match in FENCE.finditer(text):
        kind, body = match["kind"], match["body"]
        if kind.startswith("{code-block}"):
            caption = re.match(r":caption: (\S+?)(, continued)?\n\n?", body)
            assert caption, f"a code-block without a caption: {body[:60]!r}"
            yield Block("file", caption[1], bool(caption[2]), body[caption.end() :])
        else:
            assert kind in ("console", "python", *OTHER), f"nobody would try a block of kind {kind!r}"
            yield Block(kind, "", False, body)


def commands(body: str) -> list[tuple[str, str]]:
    """``(command, what it prints)`` of a console block."""
    assert body.startswith("$ "), f"a console block begins with '$ ': {body[:60]!r}"
    found = [part.partition("\n") for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]]
    result = []
    for first, _, rest in found:
        command, lines = first, rest.splitlines(keepends=True)
        while command.endswith("\\"):
            command += "\n" + lines.pop(0).rstrip("\n")
        result.append((command, "".join(lines)))
    return result


def pattern(shown: str) -> str:
    """What is shown as a pattern: ``…`` alone on a line is any lines, inside of a line any text."""
    lines = [
        r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*?") + r"\n" for line in shown.splitlines()
    ]
    return "".join(lines)


class Shell:
    """One bash, in which commands are run one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, command: str) -> tuple[str, int]:
        """What it prints, and its exit status. The shell still knows it as ``$?``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        mark = "--- end of a command ---"
        self._process.stdin.write(f'{command}\n_status=$?; echo "{mark} $_status"; (exit $_status)\n')
        self._process.stdin.flush()
        lines: list[str] = []
        alarm = Timer(LIMIT, self.kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                if mark in line:
                    before, _, status = line.partition(mark)
                    return "".join([*lines, before]), int(status)
                lines.append(line)
        finally:
            alarm.cancel()
        raise AssertionError(f"no end within {LIMIT} s, or the shell's: {command}\n{''.join(lines)}")

    def kill(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and give everything back."""
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


def environment_in(folder: Path) -> dict[str, str]:
    """A virtual environment that finds what is installed beside these tests, and installs into itself."""
    home = folder / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "host.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for name, target in SCRIPTS.items():
        module, function = target.split(":")
        script = home / "bin" / name
        script.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        script.chmod(0o755)
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("ENGINE_", "PIP_", "PYTHON"))}
    return {
        **keep,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(home),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def walk(page: Path, home: Path) -> None:
    """Do what a page says, in an empty folder."""
    folder = home / "work"
    folder.mkdir()
    shell = Shell(folder, environment_in(home))
    try:
        follow(page.read_text(), shell, folder)
    finally:
        shell.close()


def follow(text: str, shell: Shell, folder: Path) -> None:
    """Type in and compare."""
    ports = {named: free_port() for named in {"8000", *PORT.findall(text)}}
    shell.run(f"export ENGINE_PORT={ports['8000']}")
    for block in blocks(PORT.sub(lambda named: ports[named[0]], text)):
        if block.kind == "file":
            file = folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.read_text() + "\n" if block.more else ""
            file.write_text(before + block.body)
        elif block.kind == "python":
            (folder / ".block.py").write_text(block.body)
            printed, status = shell.run("python .block.py")
            assert status == 0, f"{block.body}\n{printed}"
        elif block.kind == "console":
            type_in(commands(block.body), shell)


def type_in(todo: list[tuple[str, str]], shell: Shell) -> None:
    """Run commands and compare what they print."""
    for number, (command, shown) in enumerate(todo):
        printed, status = shell.run(command)
        if status and TOO_SLOW in printed:  # measured beside other tests: once more, before it counts
            printed, status = shell.run(command)
        asks = number + 1 < len(todo) and todo[number + 1][0] == "echo $?"
        assert status == 0 or asks, f"$ {command}\n{printed}exit status {status}"
        if shown:
            printed = "".join(line.rstrip() + "\n" for line in printed.splitlines())
            assert re.fullmatch(pattern(shown), printed), f"$ {command}\n{printed}--- shown:\n{shown}"


@pytest.fixture(scope="module")
def walks(request, tmp_path_factory):
    """The chosen pages, two at a time: most of it is other processes' work."""
    chosen = [item.callspec.params["page"] for item in request.session.items if "walks" in item.fixturenames]
    with ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(walk, page, tmp_path_factory.mktemp(page.stem)) for page in chosen}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_tutorial_works(page, walks):
    walks[page].result()


def test_what_is_shown_is_compared():
    """The comparison itself: it must fail where a page is wrong."""
    assert re.fullmatch(pattern("a\n…\nb … c\n"), "a\nx\ny\nb 12 c\n")
    assert re.fullmatch(pattern("a\n…\n"), "a\n")
    assert not re.fullmatch(pattern("a\n"), "a\nb\n")
    assert commands("$ one\nprinted\n$ two \\\n  three\n") == [("one", "printed\n"), ("two \\\n  three", "")]
    with pytest.raises(AssertionError):
        list(blocks("```ruby\n```\n"))
