"""The parts of serving that need no engine: watchdog, intake, messages, streams, configuration on its way."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from engine import EngineConfig, InvalidRequest, QueueFull, SamplingParams
from engine.core.errors import ConfigError, EngineError
from engine.core.histograms import Histogram
from engine.core.models.source import resolve
from engine.core.models.tokenizer import Tokenizer, load_tokenizer
from engine.core.plan import Delta
from engine.core.protocols import Limits, ModelInfo
from engine.core.request import Finish
from engine.core.serve.host import Intake
from engine.core.serve.ledger import Ledger
from engine.core.serve.messages import (
    Abort,
    Add,
    AskStats,
    Command,
    Event,
    Fatal,
    Heartbeat,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Started,
    Stats,
    Submit,
    decode_command,
    decode_event,
    encode,
)
from engine.core.serve.pace import Ends
from engine.core.serve.streams import Stream
from engine.core.serve.text import Text
from engine.core.serve.transport import plain_config
from engine.core.serve.watchdog import Watchdog

LIMITS = Limits(max_model_len=64, max_batch_tokens=16, max_running=2, page_size=4, num_pages=8, vocab_size=99)


def test_when_to_come_again_follows_from_how_fast_requests_end() -> None:
    clock = Clock()
    ends = Ends(clock)
    assert ends.wait_for(5) == 1  # nothing is known: soon
    ends.add()
    assert ends.wait_for(5) == 15  # one end says nothing of the pace
    for _ in range(10):
        clock.now += 2
        ends.add()
    assert [ends.wait_for(wanted) for wanted in (0.1, 1, 4, 1000)] == [2, 2, 8, 60]
    clock.now += 20  # nothing has ended for long
    assert ends.wait_for(4) == 16
    for _ in range(1000):
        clock.now += 0.01
        ends.add()
    assert ends.wait_for(4) == 1


class Clock:
    """Time that moves when told, in steps that a watchdog is asked in."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wait(clock: Clock, dog: Watchdog, seconds: float, beat: tuple[int, bool] | None) -> str | None:
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        if beat is not None:
            dog.beat(*beat)
        if (cause := dog.verdict()) is not None:
            return cause
    return None


def test_watchdog_tells_silence_from_a_stall() -> None:
    clock = Clock()
    dog = Watchdog(5, 20, clock)
    assert wait(clock, dog, 100, (3, False)) is None  # idle for ever is fine
    assert wait(clock, dog, 19, (3, True)) is None
    assert wait(clock, dog, 19, (4, True)) is None  # a step has passed
    assert "no step has finished" in str(wait(clock, dog, 5, (4, True)))
    dog.beat(5, True)
    assert wait(clock, dog, 4.5, None) is None
    assert "no sign of life" in str(wait(clock, dog, 2, None))


def test_watchdog_does_not_blame_others_for_its_own_sleep() -> None:
    clock = Clock()
    dog = Watchdog(5, 20, clock)
    dog.beat(1, True)
    clock.now += 3600
    assert dog.verdict() is None
    assert "no sign of life" in str(wait(clock, dog, 6, None))


def test_readiness_goes_by_what_advances_not_by_steps() -> None:
    clock = Clock()
    dog = Watchdog(5, 20, clock)
    wait(clock, dog, 100, (3, False))
    assert (dog.stall, round(dog.silence, 3)) == (0, 0)
    for step in range(50):  # steps that bring nothing
        clock.now += 0.1
        dog.beat(step, True, 7)
    assert round(dog.stall, 3) == 4.9  # since the beat that first said there is work
    dog.beat(51, True, 8)
    assert dog.stall == 0
    clock.now += 3
    assert (round(dog.stall, 3), round(dog.silence, 3)) == (3, 3)
    dog.beat(51, False, 8)
    assert (dog.stall, dog.silence) == (0, 0)


MESSAGES: list[Command | Event] = [
    Submit([Add("a", [1, 2**40], SamplingParams(seed=-(2**63), stop=("ü",), stop_token_ids=(3,)), -1, "s", {"t": 1})]),
    Abort(["a", "b"], Finish.STOP, "END"),
    AskStats(7),
    Shutdown(),
    Ready(LIMITS, ModelInfo(name="m", vocab_size=9, max_model_len=8, eos_ids=frozenset({2, 3})), {"a": [1]}),
    Outputs([Delta("a", (1, 2), Finish.LENGTH, "kv_capacity", 4, 5, 6), Delta("b", ())], [Started("a", 0.5, "pages")]),
    Refused("a", "prompt", "is empty"),
    Stats(7, {"running": 1, "rate": 0.5}, {"step_seconds": Histogram((0.1, 1.0), [1, 2, 3], 9.5)}, {"pages": 2}),
    Heartbeat(3, True, 2),
    Fatal("ConfigError", "no", "trace"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Command | Event) -> None:
    decode = decode_command if isinstance(message, Command) else decode_event
    assert decode(encode(message)) == message


def test_garbage_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(encode(Heartbeat(1, True)))


def test_configuration_survives_the_way_to_the_child() -> None:
    config = EngineConfig.model_validate(
        {
            "scheduler": {"name": "radix", "chunked_prefill_size": 512},
            "policies": ["one", {"name": "two", "weight": 0.5}],
            "api_key": "secret",
            "num_pages": 12,
        }
    )
    there = msgspec.json.decode(msgspec.json.encode(plain_config(config)))
    assert EngineConfig.model_validate(there) == config


def test_configuration_that_cannot_travel_is_refused() -> None:
    config = EngineConfig.model_validate({"executor": {"name": "sim", "callback": object()}})
    with pytest.raises(ConfigError, match="plain values"):
        plain_config(config)


class Narrow:
    """A core whose queue holds one request, and which refuses the prompt [0]."""

    has_work = True
    settled = False
    rest = 0.001
    limits = replace(LIMITS, max_waiting=1)
    parked = ()

    def __init__(self) -> None:
        self.queue: list[str] = []
        self.asked: list[str] = []

    @property
    def waiting(self) -> list[str]:
        return self.queue

    def add(self, tokens: list[int], params: SamplingParams, *, request_id: str, **_: object) -> None:
        self.asked.append(request_id)
        if tokens == [0]:
            raise InvalidRequest("prompt", "is bad")
        if self.queue:
            raise QueueFull("full")
        self.queue.append(request_id)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: str | None = None) -> bool:
        return False

    def step(self) -> list[Delta]:
        return []

    def stats(self) -> dict[str, int | float]:
        return {}


def test_intake_keeps_the_order_and_waits_for_room() -> None:
    core = Narrow()
    intake = Intake(core)
    intake.put([Add(name, [token], SamplingParams()) for name, token in (("b", 0), ("a", 1), ("c", 1), ("d", 1))])
    assert [(item.request_id, error.field) for item, error in intake.pump()] == [("b", "prompt")]
    assert (core.queue, len(intake)) == (["a"], 2)
    assert intake.pump() == []
    assert core.asked == ["b", "a"]  # a full core is not shown prompts, which it would check each time
    assert intake.cancel("c")
    assert not intake.cancel("c")
    assert not intake.cancel("a")
    core.queue.clear()
    assert intake.pump() == []
    assert (core.queue, len(intake)) == (["d"], 0)


def test_a_slow_reader_gets_one_joined_chunk() -> None:
    stream = Stream("a", 3, SamplingParams(), None)
    for token in range(5):
        stream.feed(Delta("a", (token,), cached_tokens=2))
    chunk = stream.take()
    assert chunk is not None
    assert (chunk.token_ids, chunk.cached_tokens, chunk.output_tokens) == ((0, 1, 2, 3, 4), 2, 5)
    assert stream.take() is None
    stream.feed(Delta("a", (9,), Finish.LENGTH))
    stream.feed(Delta("a", (10,), Finish.STOP))  # late: the request had ended
    last = stream.take()
    assert last is not None
    assert (last.token_ids, last.finish_reason) == ((9,), "length")
    assert stream.exhausted


def test_what_came_before_an_error_is_delivered_first() -> None:
    stream = Stream("a", 3, SamplingParams(), None)
    stream.feed(Delta("a", (1,)))
    stream.fail(ValueError("gone"))
    chunk = stream.take()
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ((1,), None)
    with pytest.raises(ValueError, match="gone"):
        stream.take()
    assert stream.take() is None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("default"))


def fed(tokenizer: Tokenizer, text: str, params: SamplingParams, finish: Finish = Finish.LENGTH) -> Stream:
    """A stream that got the tokens of ``text`` one by one."""
    stream = Stream("a", 1, params, Text(tokenizer, params))
    tokens = tokenizer.encode(text)
    for number, token in enumerate(tokens):
        last = number == len(tokens) - 1
        stream.feed(Delta("a", (token,), finish if last else None, str(token) if finish is Finish.STOP else None))
    return stream


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    text = "one END two END three"
    for min_tokens, shown in ((0, "one "), (3, "one END two "), (8, text)):
        chunk = fed(tokenizer, text, SamplingParams(stop=("END",), min_tokens=min_tokens)).take()
        assert chunk is not None
        assert chunk.text == shown
        assert chunk.finish_reason == ("length" if shown == text else "stop")


def test_a_stop_string_in_the_very_last_text_counts(tokenizer: Tokenizer) -> None:
    chunk = fed(tokenizer, "hello END", SamplingParams(stop=("END",))).take()
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason, chunk.detail) == ("hello ", "stop", "END")


def test_a_stop_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    chunk = fed(tokenizer, "hello world", SamplingParams(), Finish.STOP).take()
    assert chunk is not None
    assert (chunk.text, chunk.finish_reason, chunk.output_tokens) == ("hello", "stop", 2)


def test_half_characters_are_held_back(tokenizer: Tokenizer) -> None:
    text = "a 🦜 é 漢字"
    params = SamplingParams()
    stream = Stream("a", 1, params, Text(tokenizer, params))
    pieces = []
    for token in tokenizer.encode(text):
        stream.feed(Delta("a", (token,)))
        chunk = stream.take()
        assert chunk is not None
        assert "\ufffd" not in chunk.text
        pieces.append(chunk.text)
    stream.feed(Delta("a", (), Finish.LENGTH))
    last = stream.take()
    assert last is not None
    assert "".join(pieces) + last.text == text


def test_undecodable_output_ends_one_request(tokenizer: Tokenizer) -> None:
    class Broken(Text):
        def push(self, token: int) -> str:
            raise UnicodeError("no such byte")

    ledger, params = Ledger(), SamplingParams()
    good, bad = Stream("good", 1, params, Text(tokenizer, params)), Stream("bad", 1, params, Broken(tokenizer, params))
    ledger.enter(good)
    ledger.enter(bad)
    assert ledger.deliver([Delta("bad", (1,)), Delta("good", (1,)), Delta("unknown", (1,))]) == [
        Abort(["bad"], Finish.ERROR, "undecodable output: no such byte")
    ]
    assert list(ledger.open) == ["good"]
    assert ledger.ended["error"] == 1
    assert isinstance(bad.error, EngineError)
