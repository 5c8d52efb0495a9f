"""``engine plugins new NAME --role ROLE``: a complete package to start from, which installs and passes its tests."""

from __future__ import annotations

import keyword
import re
from itertools import chain, count
from pathlib import Path
from typing import Annotated

import typer

from engine.core.errors import ConfigError, PluginError, suggest

BUILDS_WHEELS = "70.1"  # setuptools: the first that needs no other package
ROLE_NAMES = (
    "policy", "scheduler", "kvcache", "executor", "connector", "attention", "frontend", "grammar", "tool_parser",
)  # fmt: skip
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def new(
    name: Annotated[str, typer.Argument(help="Of the plugin and its package, e.g. shortest-first.")],
    role: Annotated[
        str,
        typer.Option(
            "--role",
            help=f"One of {', '.join(ROLE_NAMES)}.",
        ),
    ],
) -> None:
    """Write a complete package into ./NAME: code, tests that subclass the role's suite, pyproject.toml, README.

    It installs offline and passes `engine plugins check NAME` at once.
    """
    folder = write(name, role, Path.cwd())
    typer.echo(f"wrote {folder.name}/ ({role} {name!r}). Next:")
    if not can_build():
        typer.echo(f'  pip install --upgrade "setuptools>={BUILDS_WHEELS}"')
    typer.echo(f"  pip install --no-build-isolation --no-deps -e ./{name}")
    typer.echo(f"  engine plugins check {name}")
    typer.echo(f"  pytest ./{name}")


def can_build() -> bool:
    """Whether this environment builds wheels as it is (older setuptools need another package for that)."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    try:
        return Version(version("setuptools")) >= Version(BUILDS_WHEELS)
    except PackageNotFoundError:
        return False


def write(name: str, role: str, where: Path) -> Path:
    """Write the package into ``where / name`` and return that.

    Raises:
        ConfigError: the name is none for a package, or somebody has it already: a folder, a plugin of the role, a
            distribution or a module.
        PluginError: there is no such role, or no template for it.
    """
    from engine.cli.plugin_templates import CODE, PYPROJECT, README, SUITE, TESTS
    from engine.core.protocols import GROUPS

    if role not in CODE:
        raise PluginError(f"no template for role {role!r}: {suggest(role, CODE)}")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"the name {name!r} must be small letters, digits and single dashes, e.g. shortest-first")
    folder = where / name
    if folder.exists():
        raise ConfigError(f"./{name} exists already: remove it, or choose another name")
    if (owner := taken(name, role)) is not None:
        tries = chain([f"my-{name}"], (f"my-{name}-{n}" for n in count(2)))
        free = next(other for other in tries if taken(other, role) is None)
        raise ConfigError(f"the name {name!r} is taken by {owner}: choose another, e.g. {free}")
    package = package_of(name)
    words = {
        "NAME": name,
        "PACKAGE": package,
        "CLASS": "".join(part.capitalize() for part in name.split("-")),
        "ROLE": role,
        "GROUP": GROUPS[role],
        "SUITE": SUITE[role],
        "FLAG": f"--{role.replace('_', '-')}",
    }
    files = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"{package}/__init__.py": CODE[role],
        f"tests/test_{package}.py": TESTS,
    }
    for path, template in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(fill(template, words), encoding="utf-8")
    return folder


def taken(name: str, role: str) -> str | None:
    """Who has the name already: two plugins of a role by one name cannot be selected, two distributions cannot be
    installed, and a module would hide the other."""
    from importlib.metadata import PackageNotFoundError, distribution
    from importlib.util import find_spec

    from engine.core.registry import Registry

    registry = Registry()
    for its, own in registry.named(name):
        if its == role:
            owner = next(owner for role_, own_, owner in registry.owners() if (role_, own_) == (its, own))
            return f"the {role} {own!r} of {owner}" + ("" if own == name else ", which has it as an alias")
    try:
        return f"the installed distribution {distribution(name).name}"
    except PackageNotFoundError:
        hidden = (module for module in (name.replace("-", "_"), package_of(name)) if find_spec(module) is not None)
        return next((f"the module {module}" for module in hidden), None)


def package_of(name: str) -> str:
    """The package's name: never that of its folder, which Python would import in its place from beside it."""
    return name.replace("-", "_") if "-" in name else f"{name}_plugin"


def fill(template: str, words: dict[str, str]) -> str:
    """The template with every ``@WORD@`` in its place."""
    return re.sub(r"@([A-Z]+)@", lambda match: words[match.group(1)], template).lstrip("\n")
