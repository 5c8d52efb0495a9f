"""Sentences of the documents that no other test holds to the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core import Policy, SamplingParams, hookimpl
from engine.testing import make_core

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Writes(Policy):
    """Puts a token into what a request has said."""

    name = "writes"

    @hookimpl
    def order(self, waiting):
        for request in waiting:
            request.tokens[0] = 77


@pytest.mark.parametrize("audited", [False, True])
def test_a_policy_that_writes_into_tokens_is_seen_by_the_audit_alone(audited):
    """The exception that the section on faults of docs/contract.md makes."""
    core = make_core(policies=[Writes()], audit=audited)
    request = core.add([1, 2, 3], SamplingParams(max_tokens=2))
    while core.has_work:
        core.step()
    assert (request.tokens[0] == 1) == audited
    assert bool(core.hooks.faults()) == audited


def test_deltas_that_nobody_took_are_work():
    """As the documentation of ``EngineCore.has_work`` says."""
    core = make_core()
    core.add([1, 2, 3], SamplingParams(max_tokens=1))
    core.commit(core.executor.execute(core.plan()))
    assert not core.requests
    assert core.has_work
    core.take_deltas()
    assert not core.has_work


def test_whoever_loops_by_hand_takes_the_deltas():
    loops = [
        block
        for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
        for block in re.findall(r"^```.*?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if "core.commit(" in block and "has_work" in block
    ]
    assert len(loops) >= 2
    assert all("core.take_deltas()" in block for block in loops)


def test_the_tiers_of_the_readme_can_be_selected():
    shown = {}
    for flags in re.findall(r"`(--connector [^`]+)`", (DOCS.parent / "README.md").read_text()):
        code = "from engine.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code, "config", *flags.split()], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shown[flags] = done.stdout
    file = shown["--connector file --connector.file.root DIR"]
    assert re.search(r"^connectors.file.root +DIR +flag --connector.file.root$", file, re.MULTILINE)
