"""The house: every folder is packaged, every example installs, the README's commands exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _package_of(folder: Path) -> str:
    mapping = SETTINGS["tool"]["setuptools"]["package-dir"]
    names = {ROOT / path: name for name, path in mapping.items()}
    for parent in [folder, *folder.parents]:
        if parent in names:
            return ".".join([names[parent], *folder.relative_to(parent).parts])
    raise AssertionError(f"{folder} is outside of the packages")


def test_every_package_folder_is_packaged():
    found = {
        _package_of(init.parent)
        for top in ("core", "plugins", "proxy", "lab", "cli")
        for init in (ROOT / top).rglob("__init__.py")
        if "__pycache__" not in init.parts
    }
    assert found == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_every_python_file_is_in_a_package():
    for top in ("core", "plugins", "proxy", "lab", "cli"):
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file} would not be in the wheel"


def test_the_core_runs_without_torch():
    """Importing the core and stepping the sim executor must not import torch, transformers or fastapi."""
    code = """
        import sys
        from engine.core import EngineConfig, SamplingParams, assemble
        core = assemble(EngineConfig(executor="sim"))
        core.add([1, 2, 3], SamplingParams(max_tokens=2))
        while core.has_work:
            core.step()
        core.close()
        print([name for name in ("torch", "transformers", "fastapi", "typer") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_third_party_policy_changes_the_order_and_nothing_else(tmp_path):
    """``examples/plugins/shortest-first`` as a stranger ships it: its own distribution, found by its entry point."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
        "--disable-pip-version-check", "--target", str(tmp_path / "site"), str(_copy(tmp_path)),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code = """
        import json, sys
        from engine.core import EngineConfig, SamplingParams, assemble
        def run(policies):
            core = assemble(EngineConfig(executor="sim", max_running=1, policies=policies, audit=True))
            requests = [core.add([n] * n, SamplingParams(max_tokens=4)) for n in (9, 3, 12, 1)]
            started = []
            while core.has_work:
                plan = core.plan()
                started += [request.num_prompt for request in plan.admitted]
                core.commit(core.executor.execute(plan))
                core.take_deltas()
            owners = {p["name"]: p["distribution"] for p in core.describe()["plugins"]}
            stats = {k: v for k, v in core.stats().items() if k != "steps"}
            return started, [request.output for request in requests], stats, owners.get("shortest-first")
        json.dump([run([]), run(["shortest-first"])], sys.stdout)
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    (plain, ordered) = json.loads(done.stdout)
    assert plain[0] == [9, 3, 12, 1]
    assert ordered[0] == [1, 3, 9, 12]
    assert plain[1:3] == ordered[1:3], "the policy changed more than the order"
    assert (plain[3], ordered[3]) == (None, "sixhooks-shortest-first")


def _copy(tmp_path: Path) -> Path:
    """Building writes into the source folder: build a copy."""
    target = tmp_path / "source"
    target.mkdir()
    for file in (ROOT / "examples" / "plugins" / "shortest-first").iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_the_policy_is_ten_lines():
    lines = (ROOT / "examples/plugins/shortest-first/shortest_first.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith('"""')]
    assert len(code) <= 10
