"""The client's books under any sequence of events: each accepted request ends once, under one reason (case B48)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import EngineDead
from engine.core.histograms import Histogram
from engine.core.plan import Delta
from engine.core.request import Finish, SamplingParams
from engine.core.serve.ledger import Ledger
from engine.core.serve.messages import Started
from engine.core.serve.streams import Stream

ENDS = st.sampled_from([None, None, None, *Finish])
EVENTS = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("start"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("news"), st.integers(0, 9), st.tuples(st.integers(0, 3), ENDS)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.sampled_from([Finish.ERROR, Finish.ABORT])),
    st.tuples(st.just("undecodable"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("die"), st.just(0), st.just(0)),
)


class Broken:
    """Text that cannot be decoded."""

    stopped = None

    def push(self, token: int) -> str:
        raise UnicodeError("no such byte")


@given(st.lists(EVENTS, max_size=60))
def test_each_request_ends_once_whatever_happens(events: list[tuple[str, int, object]]) -> None:
    now = 0.0
    ledger = Ledger(lambda: now)
    told: Counter[str] = Counter()
    ledger.closed.append(lambda stream, reason: told.update([reason, f"id {stream.request_id}"]))
    streams: dict[int, Stream] = {}
    entered = 0
    for kind, number, more in events:
        now += 0.5
        stream = streams.get(number)
        if kind == "enter":
            if stream is None or stream.done:
                entered += 1
                assert isinstance(more, int)
                streams[number] = Stream(f"r{entered}", 3, SamplingParams(), None, tenant=("", "a", "b")[more])
                ledger.enter(streams[number])
        elif stream is None:
            continue
        elif kind == "start":
            ledger.started([Started(stream.request_id, 0.25, "pages"), Started("unknown", 0.1, "none")])
        elif kind == "news":
            count, finish = more  # type: ignore[misc]
            ledger.deliver([Delta(stream.request_id, (7,) * count, finish), Delta("unknown", (1,), Finish.STOP)])
        elif kind == "leave":
            ledger.leave([stream, stream])
        elif kind == "fail":
            assert isinstance(more, Finish)
            ledger.fail([stream], EngineDead("gone"), more)
        elif kind == "undecodable" and not stream.done:
            stream._text = Broken()  # type: ignore[assignment]
            ledger.deliver([Delta(stream.request_id, (1,))])
        elif kind == "die":
            ledger.fail(list(ledger.open.values()), EngineDead("gone"))
    ended = sum(ledger.ended.values())
    assert ledger.accepted == entered == len(ledger) + ended
    assert ended == ledger.times.whole.count == sum(told[reason.value] for reason in Finish)
    assert all(count == 1 for name, count in told.items() if name.startswith("id "))
    shares = ledger.tenants.shares
    assert all(share.accepted >= sum(share.ended.values()) for share in shares.values())
    ledger.fail(list(ledger.open.values()), EngineDead("gone"))
    assert all(share.accepted == sum(share.ended.values()) for share in shares.values())
    assert ledger.times.first.count <= ledger.accepted
    assert ledger.times.decode.count == ledger.times.first.count
    assert (len(ledger), ledger.waiting_tokens) == (0, 0)


@given(st.lists(st.floats(0, 200)), st.lists(st.floats(0, 200)))
def test_histograms_count_and_merge(one: list[float], other: list[float]) -> None:
    both, left, right = (Histogram.of((0.1, 1.0, 60.0)) for _ in range(3))
    for value in one:
        left.add(value)
    for value in other:
        right.add(value)
    for value in [*one, *other]:
        both.add(value)
    left.merge(right)
    assert left.counts == both.counts
    assert left.count == len(one) + len(other)
    assert abs(left.total - both.total) < 1e-6
    assert left.cumulative() == [
        (bound, sum(value <= bound for value in [*one, *other])) for bound in (0.1, 1.0, 60.0, float("inf"))
    ]


def test_whoever_is_told_of_an_end_sees_how_it_ended() -> None:
    ledger = Ledger()
    told: list[tuple[str, bool, str]] = []
    ledger.closed.append(lambda stream, reason: told.append((reason, stream.done, str(stream.error))))
    streams = [Stream(name, 1, SamplingParams(), Broken() if name == "a" else None) for name in "abc"]  # type: ignore[arg-type]
    for stream in streams:
        ledger.enter(stream)
    ledger.deliver([Delta("a", (1,))])
    ledger.fail([streams[1]], EngineDead("it fell"))
    ledger.leave([streams[2]])
    assert told == [
        ("error", True, "the output could not be decoded: no such byte"),
        ("error", True, "it fell"),
        ("abort", True, "None"),
    ]


def test_tokens_that_come_together_share_their_gap() -> None:
    now = 1.0
    ledger = Ledger(lambda: now)
    stream = Stream("a", 1, SamplingParams(), None)
    ledger.enter(stream)
    for at, tokens in ((3.0, 5), (4.0, 2), (4.5, 0), (5.0, 1)):
        now = at
        ledger.deliver([Delta("a", (1,) * tokens)])
    times = ledger.times
    assert (times.first.count, times.first.total) == (1, 2.0)  # the first to come have no gap
    assert (times.gap.count, times.gap.total) == (3, 2.0)
