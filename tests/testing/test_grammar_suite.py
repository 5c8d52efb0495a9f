"""Each broken grammar compiler breaks its own rule. The one that it is made of breaks none, nor does ours."""

from __future__ import annotations

import pytest
from mutant_kit import breaks, load

from engine.testing import GrammarSuite
from engine.testing.checking import check

mutants = load("grammar_mutants")

CAUGHT = {
    "AllowsAnything": ("whatever_it_allows", "is allowed, and not accepted|was allowed, which is wrong"),
    "EndsAnywhere": ("whatever_it_allows|ends_where_it_is_complete", "was allowed, which is wrong|it may end in"),
    "NeverEnds": ("whatever_it_allows|ends_where_it_is_complete", "nothing is allowed, not even an end|it may not end"),
    "AllowsMarks": ("ends_where_it_is_complete", "ids that are no text are allowed"),
    "WholePiecesOnly": ("what_is_right_is_allowed", "is right, and its token .* forbidden"),
    "GoesBackOne": ("taken_back", "and rollbacks other tokens are allowed"),
    "ForgetsTheEnd": ("taken_back", "and rollbacks other tokens are allowed"),
    "TakesAnything": ("cannot_follow_is_told", "cannot follow, and is accepted"),
    "SharesOne": ("strangers|taken_back", "one matcher went on, and others went with it"),
    "ComesUndone": ("several_compile_at_once", "allows something else when others compile"),
    "TakesAllKinds": ("no_grammar_is_refused", "is no json, and is compiled"),
    "BlamesAnother": ("no_grammar_is_refused", "the field is response_format, and 'regex' is blamed"),
    "TakesNothing": ("takes_something", r"its kinds are \(\)"),
}


def suite_of(cls):
    return type(cls.__name__, (GrammarSuite,), {"plugin": cls})


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_compiler_breaks_its_own_rule(name):
    breaks(suite_of(getattr(mutants, name)), *CAUGHT[name])


def test_every_mutant_is_tried():
    classes = [value for value in vars(mutants).values() if isinstance(value, type)]
    broken = {cls.__name__ for cls in classes if issubclass(cls, mutants.Plain)}
    assert broken - {"Plain"} == set(CAUGHT)


def test_the_template_breaks_none():
    report = check(suite_of(mutants.Plain))
    assert report.finding is None
    assert report.rules > 10
