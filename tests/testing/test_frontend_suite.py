"""Each broken frontend breaks its own rule. The one that it is made of breaks none: ``tests/cli`` holds it to all."""

from __future__ import annotations

import re

import pytest
from mutant_kit import load

from engine.core.registry import Found
from engine.testing import FrontendSuite, Violation
from engine.testing.checking import check

mutants = load("frontend_mutants")

CAUGHT = {
    "LeavesAThread": ("it_starts_and_stops", r"after SIGTERM and close\(\) threads are left: counter"),
    "LeavesASocket": ("it_starts_and_stops", r"after SIGTERM and close\(\) sockets are left: \('127.0.0.1'"),
    "DoesNotStop": ("it_starts_and_stops", "serve has not returned 3 s after SIGTERM"),
    "EndsWithAnotherCode": ("it_starts_and_stops", "after SIGTERM serve must return 0; it returned 143"),
    "FallsOverTheirPort": ("a_port_in_use_is_an_error", "must raise an EngineError; it raised OSError"),
    "MixesThemUp": ("requests_are_answered", "prompt 1, whole says"),
    "NeverEndsAStream": ("requests_are_answered", "broke off before its end"),
    "IgnoresWhoLeaves": (
        "who_leaves_ends_his_request",
        "one request of two was left; the books say|goes on; after 3 s",
    ),
    "HangsUp": (
        "a_bad_request_is_refused",
        "a body that is no JSON must be answered with an error, and the connection",
    ),
    "CorrectsThem": ("a_bad_request_is_refused", "a negative number of tokens must be refused, and was answered"),
    "LeavesTheDoorOpen": ("the_key_is_asked_for", "the key None must be refused, and was answered"),
    "TakesPartOfTheKey": ("the_key_is_asked_for", "the key 'sesamex' must be refused, and was answered"),
    "AlwaysWell": ("a_dead_engine_is_told", "the engine is dead, and the frontend says that all is well"),
}


def suite_of(name, **settings):
    cls = getattr(mutants, name)
    found = Found("frontend", cls, "local code", "")
    return type(name, (FrontendSuite,), {"plugin": cls, "origin": found, "patience": 3.0, **settings})


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_frontend_breaks_its_own_rule(name):
    rule, words = CAUGHT[name]
    suite = suite_of(name)
    (law,) = (law for law in suite.laws() if law.name == f"test_{rule}")
    try:
        with pytest.raises(Exception) as caught:
            law.check()
    finally:
        suite.teardown_class()
    assert re.search(words, str(caught.value)), caught.value


def test_every_mutant_is_tried():
    classes = [value for value in vars(mutants).values() if isinstance(value, type)]
    broken = {cls.__name__ for cls in classes if issubclass(cls, mutants.Plain)}
    assert broken - {"Plain"} == set(CAUGHT)


def test_check_ends_what_the_rules_share():
    suite = suite_of("HangsUp")
    suite.laws = classmethod(lambda cls: [law for law in super(suite, cls).laws() if "bad_request" in law.name])
    assert check(suite).finding is not None
    assert suite.shared is None


def test_one_that_does_not_begin_is_told():
    class Fails(mutants.Plain):
        """Cannot even be made."""

        def __init__(self, options=None):
            super().__init__(options)
            raise RuntimeError("no such day")

    mutants.Fails = Fails
    Fails.__module__, Fails.__qualname__ = "frontend_mutants", "Nobody"
    suite = suite_of("Fails")
    with pytest.raises(Violation, match="process has ended: AttributeError.*Nobody"):
        suite().running()
    del mutants.Fails
