"""Each broken parser of tool calls breaks its own rule; the template breaks none."""

from __future__ import annotations

import pytest
from mutant_kit import breaks

from engine.cli.plugin_new import fill
from engine.cli.plugin_templates import CODE
from engine.core import Grammar, Heard
from engine.plugins.tool_parsers.hermes import HermesParser
from engine.testing import ToolParserSuite
from engine.testing.checking import check

namespace = {}
exec(compile(fill(CODE["tool_parser"], {"NAME": "plain", "CLASS": "Plain"}), "template", "exec"), namespace)


class Changed:
    """A stream, changed."""

    def __init__(self, parser):
        self.stream, self.parser = HermesParser.stream(parser), parser

    def push(self, text):
        return self.parser.change(self.stream.push(text), text)

    def finish(self):
        return self.parser.change(self.stream.finish(), "")


class Mutant(HermesParser):
    def stream(self):
        return Changed(type(self)())


class LosesContent(Mutant):
    def change(self, heard, text):
        return heard._replace(content=heard.content.strip())


class HoldsBack(Mutant):
    held = ""

    def change(self, heard, text):
        if text:
            self.held += heard.content
            return heard._replace(content="")
        content, self.held = self.held + heard.content, ""
        return heard._replace(content=content)


class ReadsEachPiece(Mutant):
    """As if what it is given were always whole."""

    def change(self, heard, text):
        self_contained = HermesParser().stream()
        first = self_contained.push(text)
        return first if text else Heard()


class CountsFromOne(Mutant):
    def change(self, heard, text):
        return heard._replace(calls=tuple(piece._replace(number=piece.number + 1) for piece in heard.calls))


class NamesEachPiece(Mutant):
    def change(self, heard, text):
        return heard._replace(calls=tuple(piece._replace(name=piece.name or "f") for piece in heard.calls))


class MakesItNicer(Mutant):
    def change(self, heard, text):
        return heard._replace(calls=tuple(piece._replace(arguments=piece.arguments.lower()) for piece in heard.calls))


class Stumbles(Mutant):
    def change(self, heard, text):
        if "}}" in text and "name" not in text:
            raise IndexError("too many")
        return heard


class TellsHalves(Mutant):
    def change(self, heard, text):
        halves = (piece._replace(arguments=piece.arguments.replace("\\ud800", "\ud800")) for piece in heard.calls)
        return heard._replace(calls=tuple(halves))


class SaysNothing(HermesParser):
    def instructions(self, tools):
        return "Use tools."


class AllowsWords(HermesParser):
    def grammar(self, tools, *, parallel, field):
        return Grammar.regex("[a-z]{3}", field=field)


class BlamesItself(HermesParser):
    def grammar(self, tools, *, parallel, field):
        return super().grammar(tools, parallel=parallel, field="grammar")


CAUGHT = {
    LosesContent: ("content_is_told|how_a_text_is_cut", "is read as|and in pieces"),
    HoldsBack: ("content_is_told", "is certain, and was held back"),
    ReadsEachPiece: ("how_a_text_is_cut", "and in pieces"),
    CountsFromOne: ("in_order|reads_what_it_writes", "after 0 calls|index out of range"),
    NamesEachPiece: ("in_order", "after 1 calls"),
    MakesItNicer: ("reads_what_it_writes", "was written, and read as"),
    Stumbles: ("never_too_odd", "raised IndexError: too many"),
    TellsHalves: ("can_be_sent", "cannot be told: UnicodeEncodeError"),
    SaysNothing: ("instructions", "do not say 'get_weather'"),
    AllowsWords: ("grammar_is_that_of_its_calls", "which is read as"),
    BlamesItself: ("grammar_is_that_of_its_calls", "its grammar is"),
}


def suite_of(cls):
    return type(cls.__name__, (ToolParserSuite,), {"plugin": cls})


@pytest.mark.parametrize("cls", CAUGHT, ids=lambda cls: cls.__name__)
def test_a_broken_parser_breaks_its_own_rule(cls):
    if cls is AllowsWords:
        pytest.importorskip("llguidance", reason="needs pip install 'sixhooks[grammar]'")
    breaks(suite_of(cls), *CAUGHT[cls])


def test_every_mutant_is_tried():
    broken = {value for value in globals().values() if isinstance(value, type) and issubclass(value, HermesParser)}
    assert broken - {HermesParser, Mutant} == set(CAUGHT)


def test_the_template_breaks_none():
    report = check(suite_of(namespace["Plain"]))
    assert report.finding is None
    assert report.rules > 8
