"""What a request's metadata says: where from, by whom, how long, what is expected."""

from __future__ import annotations

import time

import pytest
from handoff_kit import answer_of, ask, begin, cancel, key, keys, lease, memory, wait_for

from engine.core.plan import Transfer
from engine.plugins.connectors._handoff_hints import BadHint, Hints, read_hints

GOOD = [
    ({}, Hints()),
    ({"kv_from": "a:1"}, Hints("a:1")),
    ({"kv_from": "[::1]:80"}, Hints("[::1]:80")),
    ({"kv_from": "nixl://a:1"}, Hints("a:1", "nixl")),
    ({"kv_role": "prefill", "kv_with": "nixl"}, Hints(leased=True, by="nixl")),
    ({"kv_role": "decode"}, Hints()),
    ({"kv_wait": 1, "kv_expect": True}, Hints(wait=1.0, expected=True)),
    ({"kv_wait": "0.5", "kv_expect": "true"}, Hints(wait=0.5, expected=True)),
    ({"kv_expect": "false", "kv_unknown": object()}, Hints()),
]
BAD = [
    ("kv_from", "nowhere"), ("kv_from", 7), ("kv_from", ":x"), ("kv_from", "://a:1"), ("kv_from", ["a:1"]),
    ("kv_role", "both"), ("kv_role", 1), ("kv_with", 1), ("kv_with", None),
    ("kv_expect", "perhaps"), ("kv_expect", 1), ("kv_expect", []),
    ("kv_wait", -1), ("kv_wait", "soon"), ("kv_wait", True), ("kv_wait", float("nan")), ("kv_wait", 10**400),
]  # fmt: skip


@pytest.mark.parametrize(("said", "meant"), GOOD)
def test_hints(said, meant):
    assert read_hints(said) == meant


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_hint_is_a_failed_look_up_that_names_it(name, value, opened):
    with pytest.raises(BadHint, match=f"^{name} is .* expected"):
        read_hints({name: value})
    store = opened(memory())
    hints = {"kv_from": "127.0.0.1:1", name: value}
    event = ask(store, "probe", [key(0)], **hints)
    assert (event.kind, event.reason.partition(" ")[0]) == ("failed", name)
    assert ask(store, "push", [key(0)], [0], **hints).kind == "failed"
    assert store.stats()["leases"] == 0


def test_only_peers_are_asked(opened):
    event = ask(opened(memory()), "probe", [key(0)], kv_from="192.0.2.1:80")
    assert (event.kind, "not among the peers" in event.reason) == ("failed", True)


def test_who_is_named_fetches_and_leases_and_nobody_else(opened):
    sender, local, copied = opened(memory(), "pulled"), opened(memory()), opened(memory(), "pulled")
    lease(sender, [key(0)], [0])
    named = {"kv_from": f"copied://{sender.address}"}
    event = ask(local, "probe", [key(0)], **named)
    assert (event.kind, event.tokens, event.reason) == ("found", 0, "")
    assert ask(local, "pull", [key(0)], [0], **named).kind == "failed", "it was never promised"
    assert ask(copied, "probe", [key(0)], **named).tokens == 4
    assert ask(copied, "pull", [key(0)], [0], **named).kind == "done"
    for store, leased in ((local, 0), (copied, 1)):
        begin(store, "push", [key(0)], [0], kv_role="prefill", kv_with="copied")
        assert store.stats()["leases"] == leased


@pytest.mark.parametrize("wait", [0, 1.5, "1.5"])
def test_a_look_up_waits_as_long_as_the_request_says(wait, opened):
    """Longer than a line may be silent, and than a lease lasts: the question is repeated."""
    sender, receiver = opened(memory(), lease_seconds=0.3), opened(memory(), patience=2.0, linger=0.2)
    lease(sender, [key(0)], [0])
    begin(receiver, "probe", keys(2), kv_from=sender.address, kv_wait=wait)
    start = time.monotonic()
    if wait:
        while time.monotonic() < start + 1.2:
            assert list(receiver.transfer_kv([])) == list(sender.transfer_kv([])) == []
            time.sleep(0.01)
        sender.transfer_kv([Transfer("q", "push", "r", (1,), (key(1),), hints={"kv_role": "prefill"})])
    assert answer_of(receiver).tokens == (8 if wait else 4)


# ---- kv_expect: pages are taken at once, and filled while the peer computes them


def expect(receiver, address, count=6, request="r", **hints):
    """A look-up is answered at once; then the pages are to be filled."""
    hints = {"kv_from": address, "kv_expect": True, **hints}
    (event,) = begin(receiver, "probe", keys(count), name="probe", request=request, **hints)
    assert (event.kind, event.tokens) == ("found", 4 * count)
    assert list(begin(receiver, "pull", keys(count), range(6, 6 + count), request=request, **hints)) == []


def test_what_is_expected_is_filled_as_it_is_computed(mover, opened):
    source, target = memory(), memory(seed=1)
    sender, receiver = opened(source, mover, lease_seconds=0.5), opened(target, mover)
    expect(receiver, sender.address)
    for chunk in range(3):
        time.sleep(0.1)
        at = range(2 * chunk, 2 * chunk + 2)
        lease(sender, map(key, at), at, name=f"p{chunk}")
        wait_for(lambda there=2 * chunk + 2: receiver.stats()["pages_taken"] == there)
    assert answer_of(receiver).kind == "done"
    assert all((target.read(6 + page) == source.read(page)).all() for page in range(6))
    told: list = []
    wait_for(lambda: len(told) == 3, doing=lambda: told.extend(sender.transfer_kv([])))
    assert sender.stats()["leases_released"] == 1


def test_what_is_expected_may_go_on_in_another_hand_off(mover, opened):
    """The peer's request began anew: what is leased for it now has more. Both are let go of."""
    target = memory(seed=1)
    sender, receiver = opened(memory(), mover), opened(target, mover)
    lease(sender, keys(2), range(2))
    expect(receiver, sender.address)
    wait_for(lambda: receiver.stats()["pages_taken"] == 2)
    lease(sender, keys(6), range(6), name="again", request="again")
    assert answer_of(receiver).kind == "done"
    assert all((target.read(6 + page) == memory().read(page)).all() for page in range(6))
    wait_for(lambda: sender.stats()["leases_released"] == 2, doing=lambda: sender.transfer_kv([]))


@pytest.mark.parametrize("kept", [0, 2])
def test_a_promise_that_is_not_kept_costs_no_more_than_the_patience(kept, mover, opened):
    target = memory(seed=1)
    sender, receiver = opened(memory(), mover), opened(target, mover, patience=1.0)
    if kept:
        lease(sender, keys(kept), range(kept))
    start = time.monotonic()
    expect(receiver, sender.address)
    event = answer_of(receiver)
    assert time.monotonic() - start < 3.0
    assert event.failed_pages == tuple(range(6 + kept, 12))
    assert event.reason == f"peer {sender.address}: the peer had {kept} of 6 pages in time"
    assert all((target.read(6 + page) == memory().read(page)).all() for page in range(kept))
    if kept:
        wait_for(lambda: sender.stats()["leases_released"] == 1, doing=lambda: sender.transfer_kv([]))


def test_a_promise_of_a_peer_that_is_not_there_fails_at_once(opened):
    sender, receiver = opened(memory()), opened(memory())
    address = sender.address
    sender.close()
    expect(receiver, address)
    assert "Connection refused" in answer_of(receiver).reason


@pytest.mark.parametrize("when", ["before the pull", "while it waits"])
def test_what_was_expected_and_is_not_needed_is_let_go_of(when, mover, opened):
    sender, receiver = opened(memory(), mover), opened(memory(), mover)
    lease(sender, keys(3), range(3))
    if when == "before the pull":
        begin(receiver, "probe", keys(6), name="probe", kv_from=sender.address, kv_expect=True)
        receiver.transfer_kv([Transfer("cancel probe", "cancel", "r", of="probe")])
    else:
        expect(receiver, sender.address)
        wait_for(lambda: receiver.stats()["pages_taken"] == 3)
        assert cancel(receiver).reason.endswith("cancelled")
    wait_for(lambda: sender.stats()["leases_released"] == 1, doing=lambda: sender.transfer_kv([]))
