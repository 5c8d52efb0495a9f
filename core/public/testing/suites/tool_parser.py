"""What every parser of tool calls must do: read what it writes, lose nothing, and not care how the text was cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import numpy as np

from engine.core.grammar import KINDS, unpacked
from engine.core.protocols import Plugin, ToolParser
from engine.core.registry import make
from engine.core.tools import CallPiece, Heard, Tool, ToolCall
from engine.testing.guard import Violation
from engine.testing.suites.base import Suite
from engine.testing.suites.grammar import END, vocabulary

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
PING = Tool("ping", "Says nothing.")
CALLS = (
    ToolCall("get_weather", '{"city": "Köln", "days": 3}'),
    ToolCall("ping", "{}"),
    ToolCall("get_weather", '{"city": "a \\"b\\" {c} [d], e\\\\", "more": [1, {"x": null}], "flag": true, "f": 1.5}'),
)
ODD = (
    "", " ", "Hello.", "a < b, and [1, 2] is a list {of sorts}", '{"name": 3}', "<tool_call>", "[ping(", "[note(1)]",
    '{"name": "x"', "[]", "<tool_call>no</tool_call> tail", "<tool\n<tool_call>{}</tool_call>", "[f(a=)]", "\n\n[x]\n",
)  # fmt: skip


class Whole(NamedTuple):
    """What an answer came to."""

    content: str
    calls: tuple[ToolCall, ...]


class ToolParserSuite(Suite):
    """Rules of a parser of tool calls.

    Class attributes:
        several: an answer may hold several calls.
        texts: more answers to read, as this model may write them.
    """

    role = "tool_parser"
    several: ClassVar[bool] = True
    texts: ClassVar[Sequence[str]] = ()

    def try_once(self, plugin: Plugin) -> None:
        """Read something, and close."""
        assert isinstance(plugin, ToolParser)
        plugin.stream().push("Hello.")
        plugin.close()

    # ---- rules

    def test_it_reads_what_it_writes(self) -> None:
        """Calls that it writes it reads again: the same names, the same arguments, and no content."""
        parser: ToolParser = self.make()
        for calls in self._calls():
            whole = self._read(parser, [parser.written(calls)])
            said = [(call.name, _value(call.arguments)) for call in whole.calls]
            if said != [(call.name, json.loads(call.arguments)) for call in calls] or whole.content:
                raise Violation(f"{parser.written(calls)!r} was written, and read as {whole}")

    def test_it_does_not_matter_how_a_text_is_cut(self) -> None:
        """Content and calls are the same, whether the text comes whole, in two pieces cut anywhere, or letter by
        letter; also of an answer that ends in the middle."""
        parser: ToolParser = self.make()
        for text in self._answers(parser):
            whole = self._read(parser, [text])
            for pieces in _cuts(text):
                found = self._read(parser, pieces)
                if found != whole:
                    raise Violation(f"{text!r} is {whole}, and in pieces {pieces!r} it is {found}")

    def test_content_is_told_as_it_comes(self) -> None:
        """Words that cannot be part of a call are told at once, and what is no call stays what it was."""
        parser: ToolParser = self.make()
        for text in ("Hello there.", "Höchstens 3 < 4 km.", "one\ntwo\n"):
            stream = parser.stream()
            first = stream.push(text[:8]).content
            found = self._read(parser, [text])
            if found != Whole(text, ()):
                raise Violation(f"{text!r} is no call, and is read as {found}")
            if not first:
                raise Violation(f"{text[:8]!r} is certain, and was held back")

    def test_pieces_are_in_order(self) -> None:
        """Calls are counted from 0, each begins with its name, and only its first piece has it."""
        parser: ToolParser = self.make()
        for text in self._answers(parser):
            stream, begun = parser.stream(), 0
            for heard in (*map(stream.push, text), stream.finish()):
                for piece in heard.calls:
                    new = piece.name is not None
                    if piece.number != (begun if new else begun - 1):
                        raise Violation(f"of {text!r} there is {piece} after {begun} calls")
                    begun += new

    def test_what_is_read_is_never_too_odd(self) -> None:
        """Whatever a model says, reading it raises nothing."""
        parser: ToolParser = self.make()
        rng, letters = random.Random(self.seed), "<>/tool_cal{}[]()\"'\\:,=ab1 \n" + parser.written(CALLS[:1])
        for _ in range(300):
            text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))
            try:
                self._read(parser, [text])
            except Exception as error:
                raise Violation(f"reading {text!r} raised {type(error).__name__}: {error}") from error

    def test_what_is_told_can_be_sent(self) -> None:
        """Names, arguments and content are text that UTF-8 has, also where the model wrote half a pair of surrogates;
        and values that are nested without end raise nothing."""
        parser: ToolParser = self.make()
        text = parser.written(CALLS[:1])
        for part, odd in (
            ("Köln", "\\ud800"),
            ("get_weather", "get\\ud800"),
            ("3", "[" * 3000),
            ("3", "[" * 3000 + "]" * 3000),
        ):
            for ending in (text.partition(part)[2], ""):
                said = text.partition(part)[0] + odd + ending
                try:
                    whole = self._read(parser, [said])
                    "".join([whole.content, *(word for call in whole.calls for word in call)]).encode()
                except (ValueError, RecursionError) as error:
                    raise Violation(f"{said[:200]!r} cannot be told: {type(error).__name__}: {error}") from error

    def test_instructions_name_the_tools(self) -> None:
        """What is said for a template that knows no tools names each of them, and what it takes."""
        words = self.make().instructions([WEATHER, PING])
        for word in ("get_weather", "city", "ping"):
            if word not in words:
                raise Violation(f"the instructions do not say {word!r}")

    def test_its_grammar_is_that_of_its_calls(self) -> None:
        """What the grammar for required calls allows is read as calls of these tools and nothing else (tried where
        llguidance is installed)."""
        parser: ToolParser = self.make()
        for parallel in (False, True):
            grammar = parser.grammar([WEATHER, PING], parallel=parallel, field="tools")
            if grammar.kind not in KINDS or grammar.field != "tools":
                raise Violation(f"its grammar is {grammar}")
            if find_spec("llguidance") is None:
                continue
            for seed in range(6):
                text = _walk(grammar, random.Random(seed))
                whole = self._read(parser, [text])
                wrong = whole.content or not whole.calls or (not parallel and len(whole.calls) > 1)
                if wrong or any(not _fits(call) for call in whole.calls):
                    raise Violation(f"the grammar allows {text!r}, which is read as {whole}")

    # ---- inside

    def _calls(self) -> list[Sequence[ToolCall]]:
        return [*([call] for call in CALLS), *([CALLS] if self.several else [])]

    def _answers(self, parser: ToolParser) -> Iterable[str]:
        written = [parser.written(calls) for calls in self._calls()]
        yield from written
        yield from (
            f"{before}{text}{after}" for text in written[-1:] for before, after in (("Hm.\n", ""), ("", "\nSo."))
        )
        yield from (text[:end] for text in written[:1] for end in range(0, len(text), 3))
        yield from (text[: len(text) // 2] + "}]>" + text[len(text) // 2 :] for text in written)
        yield from ODD
        yield from self.texts

    def _read(self, parser: ToolParser, pieces: Iterable[str]) -> Whole:
        stream = parser.stream()
        return joined([*map(stream.push, pieces), stream.finish()])


def joined(heard: Iterable[Heard]) -> Whole:
    """All that was heard of an answer, as one."""
    content, calls = "", list[ToolCall]()
    for one in heard:
        content += one.content
        for piece in one.calls:
            _add(calls, piece)
    return Whole(content, tuple(calls))


def _add(calls: list[ToolCall], piece: CallPiece) -> None:
    if piece.name is not None:
        calls.append(ToolCall(piece.name, piece.arguments))
    else:
        last = calls[piece.number]
        calls[piece.number] = last._replace(arguments=last.arguments + piece.arguments)


def _cuts(text: str) -> Iterable[Sequence[str]]:
    yield list(text)
    for at in range(1, len(text)):
        yield (text[:at], text[at:])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _fits(call: ToolCall) -> bool:
    value = _value(call.arguments)
    if call.name == "ping":
        return bool(value == {})
    if call.name != "get_weather" or not isinstance(value, dict) or not isinstance(value.get("city"), str):
        return False
    return len(value["city"]) <= 3 and set(value) <= {"city", "days"}


def _walk(grammar: Any, rng: random.Random) -> str:
    """Some text that the grammar allows."""
    words = vocabulary()
    compiler: Any = make("grammar", "llguidance")
    compiler.prepare(words)
    matcher, said = compiler.compile(grammar).matcher(), b""
    for _ in range(2000):
        mask = np.zeros(words.words, np.int32)
        matcher.fill(mask)
        allowed = np.flatnonzero(unpacked(mask, words.size)).tolist()
        token = END if END in allowed else rng.choice(allowed)
        if token == END:
            return said.decode(errors="replace")
        matcher.accept(token)
        said += words.tokens[token]
    raise Violation(f"the grammar of calls does not end: {said[:200]!r}")
