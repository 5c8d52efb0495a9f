"""Each deliberately broken plugin is caught by what ``engine plugins check`` runs, with a message that tells."""

from __future__ import annotations

import re

import pytest
from mutant_kit import load

from engine.core import KVCache, Policy, Scheduler
from engine.core.registry import Found
from engine.testing import DoNothing
from engine.testing.checking import check, suite_of

mutants = load("mutants")

CAUGHT = {
    "ForgetsNamespaces": ("in another namespace", "tokens of another namespace are found"),
    "FreesPagesInUse": ("live as long as a user|Pages that two requests share", "given back to the pool"),
    "MatchesTheLastToken": ("at most num_tokens - 1", "the last is never matched"),
    "LeaksPages": ("gives back every page|.", "pages are in use, and the cache counts"),
    "CountsWhatItCannotEvict": (".", "63 pages are available, and counts .* evictable=1, pinned=0"),
    "PromisesPagesInUse": ("is found again", "5 pages are in use, and the cache counts 0 as pinned"),
    "ForgetsToUnpublish": ("Keys of a failed step", "that were taken back"),
    "IgnoresWhatCameBefore": ("after another beginning", "begins differently"),
    "InventsCandidates": ("drop frees idle content|.", "dropping all candidates frees none"),
    "EvictsInSilence": ("tells exactly what it has|.", "told of and not there|pages told and pages there differ"),
    "NeverGrants": ("the first request after that is served", "a request alone got no token in 3 steps"),
    "StarvesOne": ("although new ones keep coming", "a short request has not ended after 400 steps"),
    "Forgets": ("Every request ends", "made no progress|not ended"),
    "MakesItsOwnPlan": (".", "not the one that step.seal"),
    "RollsDice": ("decided the same|ends within", "the first time and|a long request"),  # whichever rule meets it first
    "UnknownIds": ("never counted as faults", "'unknown-ids' was at fault: order answered requests that are unknown"),
    "Duplicates": ("never counted as faults", "'duplicates' was at fault: order answered .* repeated"),
    "Raises": ("never counted as faults", "'raises' was at fault: raised KeyError: 'plan'"),
    "SaysNo": ("never counted as faults", "'says-no' was at fault: admit answered False"),
    "Mutates": ("requests are read, not changed", "'mutates' was at fault: order changed .*requests are to read"),
    "ShortensAnswers": (
        "requests are read, not changed",
        "commit changed .*: requests are to read",
    ),
    "RejectsEverybody": ("comes to an empty engine is served", "not today"),
    "TakesItsTime": ("costs at most", "µs a step at 8 running"),
    "Claims": ("capabilities", "prefix-cache"),
    "Needs": ("capabilities", "teleport"),
}
ROLE = {KVCache: "kvcache", Scheduler: "scheduler", Policy: "policy"}


def report(cls: type, *, few: bool = False, **more):
    """What ``check`` says; ``few``: with fewer workloads, for those that get as far as the cost."""
    role = next(name for base, name in ROLE.items() if issubclass(cls, base))
    suite = suite_of(Found(role, cls, "local code", ""), {})
    if few:
        suite.situations = classmethod(lambda cls: super(suite, cls).situations()[::6])
    settings = {"seed": 7, "workloads": 5, "clock": mutants.Slow.clock, "running": 8, **more}
    return check(suite, **settings)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_broken_plugin_is_caught(name):
    rule, words = CAUGHT[name]
    finding = report(getattr(mutants, name), few=name in {"TakesItsTime", "RollsDice"}).finding
    assert finding is not None, f"{name} passes"
    assert re.search(words, finding.words), finding
    assert re.search(rule, finding.rule), finding


def test_every_mutant_is_tried():
    broken = {
        name for name, value in vars(mutants).items()
        if isinstance(value, type) and value.__module__ == "mutants" and issubclass(value, tuple(ROLE))
    }  # fmt: skip
    assert broken == set(CAUGHT)


def test_one_that_is_not_broken_passes():
    passed = report(DoNothing, few=True)
    assert passed.finding is None
    assert passed.workloads == 5
    assert 0.9 < passed.cost.ratio < 1.1  # the clock ticks alike for both
