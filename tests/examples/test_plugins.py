"""Packages of strangers: built as wheels, installed beside the product's wheel, found, checked, and serving.

Nothing of this checkout can be imported there: the environment is a fresh one, its product is the wheel, and only what
the product depends on is lent from the environment that runs the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"shortest-first": "policy", "generations": "kvcache"}
PRODUCT = ("core", "plugins", "proxy", "lab", "cli", "pyproject.toml", "README.md", "LICENSE")
SYSTEM = "You are a helpful assistant. " * 4


class House:
    """An environment with the product and the packages, all from wheels."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "venv" / "bin"

    def run(self, *command: str) -> str:
        """Run a command of the environment, far from this checkout; returns its output."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            capture_output=True, text=True, env=self.environment, cwd=self.root, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    root = tmp_path_factory.mktemp("house")
    wheels = [build(ROOT, root / "product", PRODUCT)]
    wheels += [build(ROOT / "examples" / "plugins" / name, root / name) for name in PACKAGES]
    call(sys.executable, "-m", "venv", "--without-pip", str(root / "venv"))
    house = House(root)
    site = Path(house.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lend_dependencies(root / "lent")
    (site / "lent.pth").write_text(f"{root / 'lent'}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(house.bin / "python"), "--disable-pip-version-check", "-q"]
    call(*pip, "install", "--no-index", "--no-deps", *map(str, wheels))
    return house


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def build(source: Path, target: Path, only: tuple[str, ...] | None = None) -> Path:
    """A wheel, built from a copy (building writes into the source folder) and without the network."""
    target.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
    for entry in source.iterdir():
        if (only is None or entry.name in only) and not entry.name.startswith("."):
            copy = target / entry.name
            shutil.copytree(entry, copy, ignore=unwanted) if entry.is_dir() else shutil.copy(entry, copy)
    call(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation",
        "--disable-pip-version-check", "-w", str(target / "dist"), str(target),
    )  # fmt: skip
    (wheel,) = (target / "dist").glob("*.whl")
    return wheel


def lend_dependencies(target: Path) -> None:
    """Links to everything that is installed here, except whatever makes this checkout importable."""
    target.mkdir()
    for folder in map(Path, sys.path):
        if folder.name != "site-packages":
            continue
        for entry in folder.iterdir():
            ours = entry.name.startswith(("sixhooks", "__editable__", "__pycache__")) or entry.suffix == ".pth"
            if not ours and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)


def test_the_product_is_the_wheel(house: House) -> None:
    code = (
        "import engine, engine.core, engine.plugins, engine.cli, engine.testing, generations, shortest_first, json;"
        "from importlib.metadata import distribution;"
        "print(json.dumps([m.__file__ for m in (engine, engine.core, engine.plugins, engine.cli, engine.testing,"
        "generations, shortest_first)] + [str(distribution('sixhooks').locate_file(''))]))"
    )
    places = [Path(place).resolve() for place in json.loads(house.run("python", "-c", code))]
    assert all(place.is_relative_to(house.root.resolve() / "venv") for place in places), places
    assert not any(place.is_relative_to(ROOT) for place in places)


def test_they_are_found_by_their_entry_points(house: House) -> None:
    listed = house.run("engine", "plugins", "list")
    for name, role in PACKAGES.items():
        assert re.search(rf"{role}.*\b{name}\b.*sixhooks-{name}", listed), listed
    assert "broken" not in listed
    assert "duplicate" not in listed


@pytest.mark.parametrize("name", PACKAGES)
def test_they_pass_the_check_of_a_stranger(house: House, name: str) -> None:
    """By the name of the distribution, as a user checks what was just installed. What a step costs is not measured:
    machines that run tests are too busy."""
    said = house.run(
        "engine", "plugins", "check", f"sixhooks-{name}", "--seed", "1", "--workloads", "5", "--cost-limit", "0"
    )
    assert f"{PACKAGES[name]} {name} (sixhooks-{name} 0.1.0)" in said
    assert said.rstrip().endswith("ok")


@pytest.mark.parametrize("name", PACKAGES)
def test_their_own_tests_pass(house: House, name: str) -> None:
    folder = house.root / name / "tests"
    said = house.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder))
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


@contextlib.contextmanager
def serving(house: House, *flags: str) -> Iterator[tuple[httpx.Client, list[str]]]:
    """``engine serve`` of that environment on a free port: a client of it, and what it prints."""
    process = subprocess.Popen(
        [str(house.bin / "engine"), "serve", "--port", "0", "--audit", "true", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=house.environment, cwd=house.root,
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"listening on (\S+)", "".join(lines))):
            assert process.poll() is None, "".join(lines)
            assert time.monotonic() < deadline, "".join(lines)
            time.sleep(0.05)
        with httpx.Client(base_url=found[1], timeout=60) as client:
            yield client, lines
        process.terminate()
        assert process.wait(30) == 0, "".join(lines)
        assert "Traceback" not in "".join(lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()


@pytest.mark.model
def test_they_serve_the_default_model(house: House) -> None:
    flags = ("--scheduler", "radix", "--kvcache", "generations", "--kvcache.protected", "0.5")
    with serving(house, *flags, "--policy", "shortest-first", "--num-pages", "256") as (client, lines):
        said = "".join(lines)
        assert re.search(r"^kvcache +generations\b.*sixhooks-generations", said, re.MULTILINE), said
        assert re.search(r"^policy +shortest-first\b.*sixhooks-shortest-first", said, re.MULTILINE), said
        wish = {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "What is the capital of France? Answer in one word."},
            ],
            "max_tokens": 8, "temperature": 0,
        }  # fmt: skip
        answers = [client.post("/v1/chat/completions", json=wish).raise_for_status().json() for _ in range(2)]
        assert "Paris" in answers[0]["choices"][0]["message"]["content"]
        assert answers[0]["choices"] == answers[1]["choices"]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached[0] == 0
        assert cached[1] > 16, "the second found nothing in the package's cache"


def test_they_serve_beside_the_other_scheduler(house: House) -> None:
    flags = ("--executor", "sim", "--scheduler", "unified", "--kvcache", "generations", "--policy", "shortest-first")
    with serving(house, *flags) as (client, _):
        wish = {"prompt": [[5] * 40, [6] * 3, [5] * 40], "max_tokens": 5}
        answer = client.post("/v1/completions", json=wish).raise_for_status().json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
