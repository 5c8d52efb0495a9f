"""What a transport may do wrong, and what becomes of it: KV memory is never written late, no slot is used too early."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest
from handoff_kit import PREFILL, STAGED, Copied, answer_of, ask, begin, cancel, key, keys, lease, memory, wait_for

from engine.core import ConfigError
from engine.core.plan import Transfer
from engine.plugins.connectors import _handoff_questions as wire
from engine.plugins.connectors._handoff_peers import Peers
from engine.plugins.connectors._handoff_wire import LeaseEnded

MOVED = ("pulled", "direct", "pushed")
moved = pytest.mark.parametrize("mover", MOVED)
staged = pytest.mark.parametrize("mover", STAGED)
A_PAGE_A_SLOT = "1KiB"  # sixteen of 64 bytes
numbers = itertools.count()


def pair(opened, mover, **options):
    """Sender, receiver, the transport of whoever of them moves the bytes, and the receiver's memory."""
    if mover.rpartition(" ")[2] in STAGED:
        options.setdefault("staging", A_PAGE_A_SLOT)
    target = memory(seed=1)
    sender, receiver = opened(memory(), mover, **options), opened(target, mover, **options)
    return sender, receiver, (sender if mover.endswith("pushed") else receiver).copy, target


def pull(receiver, sender):
    """Six pages are leased (once more), and fetched; the event that ends it."""
    name = f"p{next(numbers)}"
    sender.transfer_kv([Transfer(name, "push", name, tuple(range(6)), keys(6), hints=PREFILL)])
    return ask(receiver, "pull", keys(6), range(6, 12), kv_from=sender.address)


def is_there(target, upto=6, source=None):
    source = source or memory()
    return all((target.read(6 + page) == source.read(page)).all() for page in range(upto))


def in_limbo(store):
    return store.stats()["slots_in_limbo"]


@staged
def test_b22_b24_a_load_cancelled_while_bytes_move_ends_at_once_and_what_lands_late_hurts_nobody(mover, opened):
    sender, receiver, mover_of_bytes, target = pair(opened, mover)
    let = threading.Event()
    mover_of_bytes.script = lambda motion: setattr(motion, "held", let)
    lease(sender, keys(6), range(6))
    begin(receiver, "pull", keys(6), range(6, 12), kv_from=sender.address)
    wait_for(lambda: mover_of_bytes.motions)
    event = cancel(receiver)
    assert (event.kind, event.failed_pages) == ("failed", tuple(range(6, 12)))
    assert in_limbo(receiver) == 1
    for region in target.regions:
        region[:] = 99  # somebody else has these pages now
    mover_of_bytes.motions[0].land()
    let.set()
    assert all((region == 99).all() for region in target.regions)
    mover_of_bytes.script = lambda motion: None
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert is_there(target)
    receiver._road._staging.look()
    assert in_limbo(receiver) == 0


def test_a_load_cancelled_where_nothing_lands_late_leaves_nothing_behind(opened):
    sender, receiver, copy, _ = pair(opened, "direct")
    copy.script = lambda motion: setattr(motion, "held", threading.Event())
    lease(sender, keys(6), range(6))
    begin(receiver, "pull", keys(6), range(6, 12), kv_from=sender.address)
    wait_for(lambda: copy.motions)
    assert cancel(receiver).kind == "failed"
    assert copy.motions[0].dropped, "before the end was told"
    assert answer_of(sender, "p").kind == "done", "the lease was let go of"


@moved
def test_b23_what_came_before_a_failure_is_used(mover, opened):
    sender, receiver, copy, target = pair(opened, mover)
    third = 1 if mover == "direct" else 3  # motion; all pages are one batch there
    copy.script = lambda motion: setattr(motion, "failing", 0 if len(copy.motions) == third else None)
    event = pull(receiver, sender)
    good = third - 1
    assert (event.kind, event.failed_pages) == ("failed", tuple(range(6 + good, 12)))
    assert event.reason == f"peer {sender.address}: copy: as it was told to"
    assert is_there(target, good)
    assert in_limbo(receiver) == 0
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert is_there(target)


@moved
def test_a_motion_that_never_ends_is_given_up(mover, opened):
    sender, receiver, copy, target = pair(opened, mover, patience=0.8)
    before = target.regions[0].copy()
    copy.script = lambda motion: setattr(motion, "held", threading.Event())
    event = pull(receiver, sender)
    assert event.kind == "failed"
    assert "copy: it has not ended in 0.4 seconds" in event.reason
    assert in_limbo(receiver) == (mover != "direct")
    (motion,) = copy.motions
    assert motion.dropped == (mover == "direct")
    copy.script = lambda motion: None
    if mover != "direct":
        motion.land()
        assert (target.regions[0] == before).all()
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert is_there(target)


@staged
def test_without_a_free_slot_a_load_fails_and_the_prompt_is_computed(mover, opened):
    sender, receiver, copy, target = pair(opened, mover, patience=0.8, staging="64B")
    copy.script = lambda motion: setattr(motion, "held", threading.Event())
    assert "has not ended" in pull(receiver, sender).reason
    said = wait_for(lambda: "asked again" not in (said := pull(receiver, sender).reason) and said)
    for reason in (said, pull(receiver, sender).reason):  # the peer is not to blame: it is asked again at once
        assert "no room in the staging area (1 of its slots may still be written to)" in reason
    wait_for(lambda: sender.stats()["leases_released"] == 3, doing=lambda: sender.transfer_kv([]))
    copy.motions[0].land()
    copy.script = lambda motion: None
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert is_there(target)


@staged
def test_a_slot_that_a_failed_motion_may_still_write_to_is_free_when_the_peer_is_another_process(mover, opened):
    sender, receiver, copy, _ = pair(opened, mover, final=False)
    copy.script = lambda motion: setattr(motion, "failing", 0)
    assert "as it was told to" in pull(receiver, sender).reason
    copy.script = lambda motion: None
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert in_limbo(receiver) == 1, "the same process is there: nobody knows"
    port = int(sender.address.rpartition(":")[2])
    sender.close()
    again = opened(memory(), mover, port=port, staging=A_PAGE_A_SLOT)
    wait_for(lambda: pull(receiver, again).kind == "done")
    assert in_limbo(receiver) == 0


@pytest.mark.parametrize("mover", ["pulled", "direct"])
def test_b27_pages_read_after_their_lease_had_ended_do_not_count(mover, opened):
    """The sender reuses them while they are read: what came over is not what the keys say."""
    source, target = memory(40, (1 << 19,)), memory(40, (1 << 19,), seed=1)
    sender, receiver = (opened(one, mover, staging="2MiB") for one in (source, target))
    lease(sender, keys(20), range(20))

    def second(motion):
        if len(receiver.copy.motions) == 2:
            motion.first = reuse

    def reuse():
        sender._leases.void()
        source.regions[0][:] = 7

    receiver.copy.script = second
    expected = source.regions[0].copy()
    event = ask(receiver, "pull", keys(20), range(20, 40), kv_from=sender.address)
    good = {"pulled": 1, "direct": 8}[mover]  # a batch
    assert event.reason.endswith("the peer's lease ended while its pages were read")
    assert event.failed_pages == tuple(range(20 + good, 40))
    assert (target.regions[0][20 : 20 + good] == expected[:good]).all()


def test_a_sender_that_cannot_push_says_so(opened):
    sender, receiver, copy, target = pair(opened, "pushed")
    copy.down = "the cable is out"
    assert pull(receiver, sender).reason == f"peer {sender.address}: copy: the cable is out"
    assert in_limbo(receiver) == 0
    copy.down = ""
    wait_for(lambda: pull(receiver, sender).kind == "done")
    assert is_there(target)


def test_what_is_said_to_be_there_and_is_not_is_found_out(opened):
    sender, receiver, copy, target = pair(opened, "pushed")
    copy.script = lambda motion: motion.pieces.pop()
    before = target.regions[0].copy()
    assert "do not fit their checksum" in pull(receiver, sender).reason
    assert (target.regions[0] == before).all()
    assert in_limbo(receiver) == 1


def test_a_sender_writes_nowhere_but_to_the_staging_area_and_nothing_that_was_revoked(opened):
    sender, receiver, copy, _ = pair(opened, "pushed")
    lease(sender, keys(6), range(6))
    line, _ = Peers(receiver._identity(), "", 5.0).take(sender.address, lambda line: None)
    claim, _ = wire.find(line, keys(6))
    for offset in (1024 - 5 * 64, 1 << 62):
        with pytest.raises(wire.NotSent, match="6 pages at .* of a staging area of 1024 bytes") as caught:
            wire.want(line, 1, claim, offset, keys(6), checked=True)
        assert caught.value.over
    with pytest.raises(LeaseEnded):
        wire.want(line, 2, claim + 2, 0, keys(6), checked=True)
    assert not wire.revoke(line, 3), "it was never begun"
    with pytest.raises(wire.NotSent, match="it was revoked"):
        wire.want(line, 3, claim, 0, keys(6), checked=True)
    assert copy.motions == []
    assert wire.want(line, 4, claim, 1024 - 6 * 64, keys(8), checked=True)[0] == 6
    line.close()


@pytest.mark.parametrize("mover", ["Either direct", "Either pulled"])
@pytest.mark.parametrize("where", ["connect", "open here", "open there", "in the middle"])
def test_pages_come_over_the_line_where_the_library_does_not_reach(mover, where, opened, caplog):
    caplog.set_level(logging.INFO)
    target, small = memory(seed=1), {"staging": A_PAGE_A_SLOT}
    sender = opened(memory(), mover, down="at all" if where == "open there" else "", **small)
    receiver = opened(target, mover, down="at all" if where == "open here" else "", **small)
    if where == "connect":
        receiver.copy.down = "no route"
    elif where == "in the middle":
        receiver.copy.script = lambda motion: setattr(motion, "failing", 1)
    for number in range(2):
        target.regions[0][:] = number
        assert pull(receiver, sender).kind == "done"
        assert is_there(target)
    detours = 0 if where.startswith("open") else 2  # known beforehand, or found out
    assert receiver.stats()["detours"] == detours
    said = [record.getMessage() for record in caplog.records if "come over the line" in record.getMessage()]
    assert len(said) == bool(detours), "once"


def test_where_it_must_reach_it_is_said_why_it_does_not(opened):
    with pytest.raises(ConfigError, match="connector copied: copy: no such device"):
        opened(memory(), "pulled", down="at all")
    sender, receiver, copy, _ = pair(opened, "pulled")
    copy.down = "no route"
    assert pull(receiver, sender).reason == f"peer {sender.address}: copy: no route"


def test_other_connectors_and_other_ways_are_refused_in_words(opened):
    local, pulled, pushed = opened(memory()), opened(memory(), "pulled"), opened(memory(), "pushed")
    lease(pushed, [key(0)], [0])
    words = ask(local, "probe", [key(0)], kv_from=pulled.address).reason
    assert words == f"peer {pulled.address}: it is a 'copied' connector and this is 'local'"
    assert (
        "it is a 'local' connector and this is 'copied'" in ask(pulled, "probe", [key(0)], kv_from=local.address).reason
    )
    words = ask(pulled, "pull", [key(0)], [0], kv_from=pushed.address).reason
    assert words == f"peer {pushed.address}: pages are pushed there and pulled here"


def test_a_staging_area_that_does_not_hold_a_page_is_a_config_error(opened):
    with pytest.raises(ConfigError, match="connector copied: staging 63B does not hold one page of 64 bytes"):
        opened(memory(), "pulled", staging="63B")
    with pytest.raises(ConfigError, match="staging"):
        opened(memory(), "pulled", staging="much")
    opened(memory(), "pulled", staging="63B", role="prefill")  # nothing comes in


def test_a_missing_library_is_said_with_what_to_install():
    class Missing(Copied):
        name = "missing"

        def transport_factory(self):
            raise ConfigError("connector missing: needs copy: pip install 'sixhooks[copy]'")

    with pytest.raises(ConfigError, match=r"sixhooks\[copy\]"):
        Missing()


@moved
def test_a_motion_may_take_longer_than_the_lease(mover, opened):
    """The receiver renews while it reads; the sender ends nothing while it writes."""
    sender, receiver, copy, target = pair(opened, mover, lease_seconds=0.4, patience=20.0)
    let = threading.Event()
    copy.script = lambda motion: setattr(motion, "held", let)
    lease(sender, keys(6), range(6))
    begin(receiver, "pull", keys(6), range(6, 12), kv_from=sender.address)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert list(sender.transfer_kv([])) == []
        time.sleep(0.01)
    let.set()
    assert answer_of(receiver).kind == "done"
    assert is_there(target)


def test_a_claim_is_renewed_while_its_request_waits_for_room(mover, opened):
    """The core asks now and then; a receiver that died does not, and the lease ends."""
    sender, receiver = opened(memory(), mover, lease_seconds=0.4), opened(memory(seed=1), mover)
    lease(sender, keys(6), range(6))
    assert ask(receiver, "probe", keys(6), kv_from=sender.address).tokens == 24
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert list(receiver.transfer_kv([])) == list(sender.transfer_kv([])) == []
        time.sleep(0.01)
    assert ask(receiver, "pull", keys(6), range(6), kv_from=sender.address).kind == "done"
    sender.transfer_kv([Transfer("q", "push", "q", tuple(range(6)), keys(6), hints=PREFILL)])
    assert ask(receiver, "probe", keys(6), kv_from=sender.address).tokens == 24
    wait_for(lambda: [event for event in sender.transfer_kv([]) if event.transfer_id == "q"])


def test_who_was_not_asked_for_longest_is_forgotten_by_the_library_too(opened, monkeypatch):
    monkeypatch.setattr("engine.plugins.connectors._handoff_peers.KNOWN", 1)
    monkeypatch.setattr("engine.plugins.connectors._handoff_pusher.KNOWN", 1)
    for mover in STAGED:
        senders = [opened(memory(), mover) for _ in range(2)]
        receivers = [opened(memory(), mover) for _ in range(2)]
        for receiver, sender in ((receivers[0], senders[0]), (receivers[0], senders[1]), (receivers[1], senders[1])):
            assert pull(receiver, sender).kind == "done"
        other = senders[1] if mover == "pulled" else receivers[1]
        assert list((senders[1] if mover == "pushed" else receivers[0]).copy.peers) == [other.incarnation]
        assert pull(receivers[0], senders[0]).kind == "done", "and found again"


def test_a_sender_that_is_closed_gives_up_what_it_pushes(opened):
    sender, receiver, copy, _ = pair(opened, "pushed", patience=60.0)
    copy.script = lambda motion: setattr(motion, "held", threading.Event())
    lease(sender, keys(6), range(6))
    begin(receiver, "pull", keys(6), range(6, 12), kv_from=sender.address)
    wait_for(lambda: copy.motions)
    sender.close()
    assert answer_of(receiver).kind == "failed"
    assert copy.closed


def test_new_weights_end_the_leases_of_the_old_ones(mover, opened):
    from engine.core import ModelInfo

    sender, receiver = opened(memory(), mover), opened(memory(), mover)
    lease(sender, keys(6), range(6))
    assert ask(receiver, "probe", keys(6), kv_from=sender.address).tokens == 24
    for store in (sender, receiver):
        store.weights_changed(ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint="new"))
    assert answer_of(sender, "p").kind == "done", "at once, and not when its time is up"
    assert "lease had ended" in ask(receiver, "pull", keys(6), range(6), kv_from=sender.address).reason
    lease(sender, keys(6), range(6), name="q")
    assert ask(receiver, "probe", keys(6), kv_from=sender.address, request="s").tokens == 24


@pytest.mark.parametrize("why", ["cancelled", "left alone"])
def test_b27_what_was_found_and_never_asked_for_is_let_go_of(why, mover, opened, monkeypatch):
    """Its fetch ends before it has begun to talk: nobody else would ever release the claim, but renew it for ever."""
    sender, receiver = opened(memory(), mover), opened(memory(seed=1), mover)
    lease(sender, keys(6), range(6))
    assert ask(receiver, "probe", keys(6), name="probe", kv_from=sender.address).tokens == 24
    if why == "cancelled":
        let = threading.Event()
        monkeypatch.setattr(Peers, "trouble", lambda *_: "" if let.wait(10) else "late")
        begin(receiver, "pull", keys(6), range(6), kv_from=sender.address)
        events = receiver.transfer_kv([Transfer("cancel t", "cancel", "r", of="t")])
        let.set()
        assert (events[0] if events else answer_of(receiver)).kind == "failed"
    else:
        monkeypatch.setattr(Peers, "trouble", lambda *_: "it failed")
        assert "it failed" in ask(receiver, "pull", keys(6), range(6), kv_from=sender.address).reason
    wait_for(lambda: sender.stats()["leases_released"] == 1, doing=lambda: sender.transfer_kv([]))
    assert "r" not in receiver._claims
