"""The reference has every public name, and the tutorials every template."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import engine
import engine.core
import engine.testing
from engine.cli.plugin_templates import CODE
from engine.core.protocols import ROLES

DOCS = Path(__file__).resolve().parents[2] / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.rst")))


@pytest.mark.parametrize("package", [engine, engine.core, engine.testing], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(package):
    """Most have their places; a page of each package takes up the rest, so a new name cannot be forgotten."""
    assert "automodule:: engine.core.errors" in REFERENCE
    assert f".. others:: {package.__name__}\n" in REFERENCE


def test_the_built_in_plugins_of_every_role_are_in_the_reference():
    assert set(re.findall(r"^\.\. plugins:: (\w+)$", REFERENCE, re.MULTILINE)) == set(ROLES)


def test_there_is_a_tutorial_for_each_role_that_people_write_first():
    pages = {page.stem for page in (DOCS / "tutorials").glob("*.md")} - {"index"}
    assert pages == set(CODE) - {"executor", "attention", "frontend", "grammar", "tool_parser"}
    index = (DOCS / "tutorials" / "index.md").read_text()
    for page in pages:
        assert f"({page}.md)" in index
