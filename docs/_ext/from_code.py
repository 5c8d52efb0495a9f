"""What the site takes from the code: options of plugins, comments beside fields, fragments of the changelog.

Directives::

    .. plugins:: scheduler              every built-in plugin of a role, with its options
    .. fields:: engine.EngineConfig     the fields of a pydantic model as a table
    .. others:: engine.testing          public names of a package that no page of the reference has put in its place
    .. fragments::                      what changed since the last release
"""

from __future__ import annotations

import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pydantic import BaseModel
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from engine.cli.plugin_show import hooks_of
from engine.core import errors
from engine.core.registry import Registry
from engine.core.values import bounds_of, kind_of

BUILT_IN = "sixhooks"


class Written(SphinxDirective):
    """A directive that writes markup, which is then parsed as if it stood there."""

    def lines(self) -> Iterator[str]:
        """The markup."""
        raise NotImplementedError

    def run(self) -> list[Any]:
        """Parse it."""
        return self.parse_text_to_nodes("\n".join(self.lines()), allow_section_headings=True)


class Plugins(Written):
    """The built-in plugins of a role."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """A heading each, what it is, how to select it, what it takes."""
        role = self.arguments[0]
        registry = Registry()
        for line in registry.listing():
            if (line.role, line.distribution) != (role, BUILT_IN):
                continue
            cls = registry.select(role, line.name).cls
            names = " = ".join(f"``{name}``" for name in (line.name, *line.aliases))
            yield from (names, "~" * len(names), "")
            yield from (*_words(cls), "")
            facts = {
                "hooks": ", ".join(f"``{hook}``" for hook in hooks_of(cls)),
                "provides": ", ".join(f"``{word}``" for word in sorted(cls.provides)),
                "requires": ", ".join(f"``{word}``" for word in sorted(cls.requires)),
                "class": f"``{cls.__module__}.{cls.__qualname__}``",
            }
            yield from (f":{name}: {words}" for name, words in facts.items() if words)
            yield ""
            yield from table(cls.Options)


class Fields(Written):
    """The fields of a pydantic model."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """A table."""
        module, _, name = self.arguments[0].rpartition(".")
        yield from table(getattr(importlib.import_module(module), name))


class Others(Written):
    """Public names that came after the page was written."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """A section, if there are any."""
        package = importlib.import_module(self.arguments[0])
        missing = sorted(set(package.__all__) - set(vars(errors)) - named(Path(self.env.srcdir) / "reference"))
        if missing:
            yield from ("More", "----", "")
        for name in missing:
            value = getattr(package, name)
            how = "autoclass" if inspect.isclass(value) else "autofunction" if callable(value) else "autodata"
            yield from (f".. {how}:: {package.__name__}.{name}", "")


class Fragments(SphinxDirective):
    """Changelog fragments, the newest first. For Markdown pages."""

    def run(self) -> list[Any]:
        """One list."""
        folder = Path(self.env.srcdir) / "changelog.d"
        files = sorted(folder.glob("*.*.md"), key=lambda file: _number(file.name), reverse=True)
        lines: list[str] = []
        for file in files:
            self.env.note_dependency(str(file))
            first, *rest = file.read_text(encoding="utf-8").splitlines()
            lines += [f"* {first}", *(f"  {line}" for line in rest)]
        return self.parse_text_to_nodes("\n".join(lines))


def named(folder: Path) -> set[str]:
    """Names that pages of the reference document."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.rst")))
    return {path.rpartition(".")[2] for path in re.findall(r"^\.\. (?:auto\w+|py:data):: (\S+)", text, re.MULTILINE)}


def table(model: type[BaseModel]) -> Iterator[str]:
    """A list table of fields with their types, defaults and descriptions."""
    if not model.model_fields:
        yield from ("It has no options.", "")
        return
    yield from (".. list-table::", "   :header-rows: 1", "   :widths: auto", "")
    yield from ("   * - option", "     - type", "     - default", "     - meaning")
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"``{_plain(field.get_default(call_default_factory=True))}``"
        kind = ", ".join(filter(None, (kind_of(field.annotation), bounds_of(field))))
        yield from (f"   * - ``{name}``", f"     - {kind}", f"     - {default}")
        words = field.description or ""
        yield "     - " + re.sub(r"(?<!\S)\*(?!\w)", r"\\*", words)  # a lone star is no markup
    yield ""


def _words(cls: type) -> list[str]:
    """A class's docstring up to the first section such as ``Attributes:``."""
    lines = (inspect.getdoc(cls) or "").splitlines()
    end = next((at for at, line in enumerate(lines) if re.fullmatch(r"\w[\w ]*:", line)), len(lines))
    return lines[:end]


def _plain(value: Any) -> str:
    return repr(getattr(value, "name", value))


def _number(name: str) -> tuple[int, str]:
    found = re.match(r"\d+", name)
    return (int(found.group()) if found else 0, name)


@cache
def comments(cls: type) -> dict[str, str]:
    """Field or member name -> the comment at the end of its line: this code documents short fields so."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.start[1] == 4:
            name = token.string
        elif token.type == tokenize.COMMENT and name and token.line.startswith(f"    {name}"):
            found[name] = token.string.lstrip("# ")
    return found


def improve(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """A field without a docstring is documented by its comment, and a colon in a property's text ends no type."""
    if what == "attribute" and (not any(map(str.strip, lines)) or lines[0].startswith("Alias for field")):
        words = _comment(name)
        lines[:] = [words[:1].upper() + words[1:] + "." * (not words.endswith(".")), ""] if words else [""]
    if what in ("attribute", "property") and lines and ":" in lines[0]:
        lines[0] = f": {lines[0]}"


def _comment(name: str) -> str:
    path, _, field = name.rpartition(".")
    module, _, qualified = path.rpartition(".")
    try:
        return comments(getattr(importlib.import_module(module), qualified)).get(field, "")
    except (ImportError, AttributeError):
        return ""


def shorten(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """A default that is made anew for each object is written as ``...``: the signature stays valid Python."""
    return (signature or "").replace("<factory>", "...") or None, returns


def fill_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """In ``index``, ``page?`` names a page that may not be there, and ``*?`` all top-level pages not named."""
    if docname != "index":
        return
    pages = sorted(name for name in app.env.found_docs if "/" not in name and name != "index")
    named = set(re.findall(r"^([a-z]+)\??$", source[0], re.MULTILINE))
    source[0] = re.sub(
        r"^([a-z]+|\*)\?\n",
        lambda at: "".join(f"{p}\n" for p in pages if p == at[1] or (at[1] == "*" and p not in named)),
        source[0],
        flags=re.MULTILINE,
    )


def resolve_outside(app: Sphinx, doctree: nodes.document) -> None:
    """A link to a folder leads to its ``index`` page; what lies outside of the site is named and not linked."""
    env = app.env
    for link in list(doctree.findall(pending_xref)):
        if link.get("reftype") != "myst" or link["reftarget"] in env.found_docs:
            continue
        here = Path(env.doc2path(link["refdoc"])).parent
        target = (here / link["reftarget"]).resolve()
        page = f"{target.relative_to(env.srcdir)}/index" if target.is_relative_to(env.srcdir) else ""
        if page in env.found_docs:
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, None
        elif target.is_dir() or target.with_suffix(".md").is_file():
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx."""
    app.add_directive("plugins", Plugins)
    app.add_directive("fields", Fields)
    app.add_directive("others", Others)
    app.add_directive("fragments", Fragments)
    app.connect("autodoc-process-docstring", improve, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten)
    app.connect("source-read", fill_navigation)
    app.connect("doctree-read", resolve_outside)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
