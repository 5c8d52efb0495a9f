"""Each broken attention backend is caught by the rule that it breaks; the one that is not broken passes."""

from __future__ import annotations

import re

import pytest
from mutant_kit import load

from engine.core.registry import Found
from engine.testing import AttentionSuite
from engine.testing.checking import check

mutants = load("attention_mutants")

CAUGHT = {
    "ReadsWholePages": ("behind a row's last token", "comes from slots beyond the row's length"),
    "IgnoresThePageTable": ("whatever the order of pages", "with its pages in reverse, position .* is off by"),
    "InterleavesHeads": ("Query head h reads KV head", "head 1 must read KV head 0; it answers as if it read 1.00"),
    "SeesOneTooMany": ("reads positions 0 … p", r"position 0 of row 0 .* reads \[0, 1\]"),
    "DoesNotSeeItself": ("reads positions 0 … p", r"position 1 of row 0 .* reads \[0\]"),
    "ForgetsTheContext": ("reads positions 0 … p", r"position 2 of row 1 .* reads \[0\]"),
    "WritesFromTheFirstPage": ("land in the slots of their positions", "K in page .* is not what it must be"),
    "MixesRows": ("reaches no answer of another", "row 1 holds NaN, and so does the answer to row"),
    "LeavesTheLastRowOut": ("all of it is computed", "comes from memory that nobody wrote"),
    "ScalesTheQuery": ("are read", "the query is another one after attend"),
    "Overflows": ("Scores in the thousands", "with large scores"),
    "PlansOnce": ("plan_batch is told once a step", "in layer 0|cannot|index|shape"),
    "HasItsOwnScale": ("Scores are multiplied by the scale", "with a scale of 0.3, .* is off by"),
    "Jitters": ("bit for bit", "the answers differ"),
    "DependsOnCompany": ("alike, bit for bit, alone and in any batch", "by [0-9.]+e-0[67] at most"),
    "WindowsAreOneTooWide": ("with a window of w tokens", r"window of 1, .* position 1 of row 0 .* reads \[0, 1\]"),
    "ForgetsTheWindow": ("with a window of w tokens", r"window of 1, .* position 1 of row 0 .* reads \[0, 1\]"),
    "CapsAfterTheFact": ("tanh", "with what a layer may have, position .* is off by"),
    "CapsEveryLayer": ("leaves the next one, of the same step, without", "in a plain layer after one that is not"),
    "RoundsTowardsZero": ("the nearest number of fp8", r"[KV] of .* is stored as .* in pages of float8_e4m3fn"),
    "Overshoots": ("the nearest number of fp8", r"K of -?\d+ is stored as nan"),
}


class Quick(AttentionSuite):
    page_sizes = (1, 4, 16)
    dtypes = ("float32",)
    long_context = 200


def finding(name, **settings):
    cls = getattr(mutants, name)
    suite = type(name, (Quick,), {"plugin": cls, "origin": Found("attention", cls, "local code", ""), **settings})
    return check(suite).finding


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_backend_is_caught(name):
    rule, words = CAUGHT[name]
    fp8 = {"dtypes": ("float32", "bfloat16")} if "fp8" in rule else {}
    found = finding(name, batch_invariant=name == "DependsOnCompany", **fp8)
    assert found is not None, f"{name} passes"
    assert re.search(rule, found.rule), found
    assert re.search(words, found.words), found


def test_every_mutant_is_tried():
    broken = {
        name
        for name, value in vars(mutants).items()
        if isinstance(value, type) and value.__module__ == "attention_mutants"
    }
    assert broken - {"Plain", "Featured"} == set(CAUGHT)


@pytest.mark.parametrize("name", ["Plain", "Featured"])
def test_one_that_is_not_broken_passes(name):
    assert finding(name, dtypes=("float32", "bfloat16"), batch_invariant=True) is None


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_backend_of_one_kind_is_tried_with_that_kind(kind):
    class Half(mutants.Plain):
        """Refuses what it does not provide."""

        provides = frozenset({f"attention:{kind}"})

        def plan_batch(self, batch):
            """Raises for other batches."""
            assert all((count == 1) == (kind == "decode") for count in batch.counts)
            super().plan_batch(batch)

    mutants.Half = Half
    try:
        assert finding("Half") is None
    finally:
        del mutants.Half


def test_what_need_not_hold_is_told():
    cls = mutants.DependsOnCompany
    suite = type("Told", (Quick,), {"plugin": cls, "origin": Found("attention", cls, "local code", "")})
    report = check(suite)
    assert report.finding is None
    assert re.fullmatch(r"batch invariance: .* to within \d\.\de-0[67]", report.notes[0])
