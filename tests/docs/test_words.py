"""Sentences of the documents that no other test holds to the code."""

from __future__ import annotations

import pytest

from engine.core import Policy, SamplingParams, hookimpl
from engine.testing import make_core


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
