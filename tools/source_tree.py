"""Lay the package out as Python sees it, in links: ``.build/tree/engine/{core,plugins,cli,…}``.

The folders of this repository are not laid out like the package (``core/public`` is ``engine``, ``core`` is
``engine.core``), and type checkers and import linters read folders. Prints the tree's path.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build() -> Path:
    """Make the tree anew from pyproject.toml's package list; returns its root."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders: dict[str, str] = settings["package-dir"]
    tree = ROOT / ".build" / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for package in settings["packages"]:
        prefix = max((p for p in folders if package == p or package.startswith(p + ".")), key=len)
        source = ROOT / folders[prefix] / package[len(prefix) :].lstrip(".").replace(".", "/")
        target = tree / package.replace(".", "/")
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file():
                (target / file.name).symlink_to(file)
    return tree


if __name__ == "__main__":
    print(build())
