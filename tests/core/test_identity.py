"""Whose KV may be reused for whom: equal tokens under another identity never meet (cases B13, B20)."""

from __future__ import annotations

import itertools
from hashlib import blake2b

import pytest

from engine.core import SamplingParams
from engine.core.identity import namespace_digest, pack, page_digests
from engine.testing import ShadowExecutor, make_core

TOKENS = [7, 3, 9, 1] * 6
IDENTITIES = [
    {},
    {"adapter": "A"},
    {"adapter": "B"},
    {"adapter": "A@2"},  # the same name with other weights: whoever reloads says so in the name
    {"salt": "A"},  # a salt that looks like an adapter
    {"salt": "adapter:1:A;"},  # or like a field of the digest
    {"adapter": "A", "salt": "A"},
    {"adapter": "A", "salt": "B"},
]


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(8), repeat=2)))
def test_b13_only_the_same_identity_is_a_hit(kvcache, first, second):
    core = make_core(scheduler="unified", kvcache=kvcache, num_pages=40, page_size=4, executor=ShadowExecutor())
    cached = []
    for number in (first, second):
        request = core.add(TOKENS, SamplingParams(max_tokens=2), **IDENTITIES[number])
        while core.has_work:
            core.step()
        cached.append(request.cached_tokens)
    assert cached == [0, 20 if first == second else 0]
    assert core.executor.mismatch is None


def test_b13_other_weights_under_one_name_are_another_model():
    digests = {namespace_digest(fingerprint, "A", "") for fingerprint in ("weights 1", "weights 2", "")}
    assert len(digests) == 3


def test_b20_a_pages_key_is_a_cryptographic_digest_of_all_before_it():
    """Written out once more from its description, so that it cannot change unseen: other processes rely on it."""

    def field(kind: bytes, value: str) -> bytes:
        return kind + b":%d:" % len(value.encode()) + value.encode() + b";"

    head = b"sixhooks-kv-1;" + field(b"model", "m") + field(b"adapter", "é") + field(b"salt", "s;")
    expected = [blake2b(head, digest_size=32).digest()]
    assert namespace_digest("m", "é", "s;") == expected[0]
    tokens = [1, 2**31, 49151, 4, 5, 6, 7]
    for at in (0, 3):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + 3])
        expected.append(blake2b(expected[-1] + page, digest_size=32).digest())
    assert page_digests(expected[0], pack(tokens), 3) == expected[1:]


def test_b20_tenants_never_meet_however_alike_their_tokens_are():
    core = make_core(scheduler="radix", kvcache="radix", num_pages=100, page_size=4, executor=ShadowExecutor())
    for number in range(40):
        request = core.add([number % 5, *TOKENS], SamplingParams(max_tokens=2), salt=f"tenant {number // 5 % 2}")
        while core.has_work:
            core.step()
        assert bool(request.cached_tokens) == (number >= 10), "ten different beginnings, then all are there"
    assert core.executor.mismatch is None
