"""``hermes``: calls as JSON between ``<tool_call>`` and ``</tool_call>``, as Hermes, Qwen and many others write them.

Source: the function-calling format of NousResearch's Hermes 2 Pro; vLLM's parser of that name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from engine.core.grammar import Grammar
from engine.core.protocols import ToolParser
from engine.core.tools import CallPiece, Heard, Tool, ToolCall, embedded, mended

BEGIN, END = "<tool_call>", "</tool_call>"
MOST_BLANKS = 64  # that are held before what may be a mark
NAME, ARGUMENTS = "name", ("arguments", "parameters")
INSTRUCTIONS = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    "You may call one or more functions to assist with the user query. Don't make assumptions about what values to "
    "plug into functions. Here are the available tools: <tools>\n{tools}\n</tools>\n"
    "For each function call return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags as follows:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-dict>}}\n</tool_call>'
)


class HermesParser(ToolParser):
    """JSON between <tool_call> and </tool_call>: one call, or a list of calls. What stands around is content."""

    name = "hermes"
    marks = (BEGIN, END)

    def stream(self) -> HermesStream:
        """Reads one answer."""
        return HermesStream()

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, field: str) -> Grammar:
        """One call, or several, of these tools, and nothing else."""
        rules = [f"start: call{' (NEWLINE call)*' if parallel else ''}", 'NEWLINE: "\\n"']
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            head = f'{BEGIN}\n{{"name": {json.dumps(tool.name)}, "arguments": '
            rules.append(f"call_{number}: {json.dumps(head)} args_{number} {json.dumps(f'}}{chr(10)}{END}')}")
            rules.append(f"args_{number}: {embedded(tool.schema)}")
        return Grammar.lark("\n".join(rules), field=field)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """The system prompt of Hermes."""
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.plain()) for tool in tools))

    def written(self, calls: Sequence[ToolCall]) -> str:
        """As the model writes them."""
        return "\n".join(
            f'{BEGIN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n{END}' for call in calls
        )

    def answered(self, content: str) -> str:
        """What a function gave back."""
        return f"<tool_response>\n{content}\n</tool_response>"


class HermesStream:
    """Reads one character after the other, so that it does not matter how the text is cut.

    A call is told once its name is known; before that, what is no call after all becomes content, marks included. After
    that, what the model breaks is told as it is: arguments that are no JSON.
    """

    def __init__(self) -> None:
        self._index = -1
        self._content: list[str] = []
        self._calls: list[CallPiece] = []
        self._held = ""  # what may be the beginning of a mark, or blanks before one
        self._inside: _Object | None = None
        self._raw: list[str] = []  # of the segment since its mark, while it may still turn out to be no call
        self._segment = False  # between marks: in an object of it, or in none

    def push(self, text: str) -> Heard:
        """More of the answer; what is certain of it. Mutates."""
        for character in text:
            if self._segment:
                self._in_segment(character)
            else:
                self._outside(character)
        return self._take()

    def finish(self) -> Heard:
        """The answer is over: what was held back. Mutates."""
        if self._segment:
            self._content += self._raw
        elif self._index < 0 or self._held.strip():
            self._content.append(self._held)
        self._held, self._raw = "", []
        self._segment, self._inside = False, None
        return self._take()

    def _take(self) -> Heard:
        pieces = []
        for number, group in groupby(self._calls, lambda piece: piece.number):
            parts = list(group)
            pieces.append(CallPiece(number, parts[0].name, "".join(piece.arguments for piece in parts)))
        heard = Heard("".join(self._content), tuple(pieces))
        self._content, self._calls = [], []
        return heard

    def _outside(self, character: str) -> None:
        self._held += character
        mark = self._held.lstrip()
        if mark == BEGIN:
            self._raw, self._held, self._segment = [self._held], "", True
        elif mark and not BEGIN.startswith(mark):
            self._release()
        elif not mark and len(self._held) > MOST_BLANKS:
            self._content.append(self._held)
            self._held = ""

    def _release(self) -> None:
        """What is held is no mark: all of it is content, but for a tail that may be the beginning of one."""
        held = self._held
        keep = next((at for at in range(1, len(held)) if _may_be(held[at:])), len(held))
        self._content.append(held[:keep])
        self._held = held[keep:]

    def _in_segment(self, character: str) -> None:
        if self._raw:
            self._raw.append(character)
        if self._inside is not None:
            self._in_object(character)
        elif character == "{":
            self._inside = _Object()
            self._inside.push(character)
        elif character not in " \t\r\n[],":
            self._held += character
            if self._held == END:
                self._content += self._raw  # empty, where it has told a call
                self._held, self._raw, self._segment = "", [], False
            elif not END.startswith(self._held):
                self._give_up()

    def _in_object(self, character: str) -> None:
        inside = self._inside
        assert inside is not None
        piece = inside.push(character)
        if inside.broken:
            self._inside = None
            self._give_up()
            return
        if inside.named and inside.fresh:
            inside.fresh = False
            self._index += 1
            self._raw = []
            self._calls.append(CallPiece(self._index, inside.name, ""))
        if piece:
            self._calls.append(CallPiece(self._index, None, piece))
        if inside.done:
            if inside.named and not inside.argued:
                self._calls.append(CallPiece(self._index, None, "{}"))
            self._inside = None
            if not inside.named:
                self._give_up()

    def _give_up(self) -> None:
        """The segment is no call, or no call any more: what of it was told as nothing yet is content."""
        self._content += self._raw or [self._held]
        self._raw, self._held, self._segment = [], "", False


class _Object:
    """Follows one JSON object: its name, and the text of its arguments as it comes.

    Attributes:
        name, named: the function's name; whether it is known.
        argued: its arguments have begun.
        done, broken: it is complete; it is no object.
        fresh: nobody was told of it yet.
    """

    def __init__(self) -> None:
        self.name = ""
        self.named = self.argued = self.done = self.broken = False
        self.fresh = True
        self._depth = 0
        self._in_string = self._escaped = False
        self._text: list[str] = []  # of the string, or the value, that is being read at the object's own level
        self._blank = True  # nothing but blanks is in it
        self._key: str | None = None
        self._waiting: list[str] = []  # arguments that came before the name
        self._quoted = False

    def push(self, character: str) -> str:
        """One character more; returns what it adds to the arguments that can be told. Mutates."""
        if self._key is not None and (self._depth > 1 or not self._ends(character)):
            return self._value(character)
        if self._in_string:
            self._string(character)
        elif character == '"':
            self._in_string, self._text = True, ['"']
        elif character == "{" and self._depth == 0:
            self._depth = 1
        elif character == "}" and self._depth == 1:
            self._end_value()
            self.done = True
        elif character == ",":
            self._end_value()
        elif character == ":" and self._text:
            self._key, self._text, self._blank = _string_of("".join(self._text)), [], True
            self.broken = self._key is None
        elif not character.isspace():
            self.broken = True
        return self._flush()

    def _ends(self, character: str) -> bool:
        """Whether it ends the value that is read at the object's own level."""
        return character in ",}" and not self._in_string and not self._blank

    def _string(self, character: str) -> None:
        self._text.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _value(self, character: str) -> str:
        if self._in_string:
            self._string(character)
        else:
            self._text.append(character)
            self._blank = self._blank and character.isspace()
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
        if self._key in ARGUMENTS:
            self._argue(character)
        return self._flush()

    def _argue(self, character: str) -> None:
        """Blanks around the value are none of it; one that is a text holds the JSON, and is told when it is whole."""
        if character.isspace() and not self._in_string and self._depth == 1:
            return
        if not self.argued:
            self.argued, self._quoted = True, character == '"'
        if not self._quoted:
            self._waiting.append(character)

    def _end_value(self) -> None:
        text = "".join(self._text)
        if self._key == NAME:
            name = _string_of(text.strip())
            if not name or self.named:
                self.broken = True
            else:
                self.name, self.named = name, True
        elif self._key in ARGUMENTS and self._quoted:
            self._waiting.append(_string_of(text.strip()) or text)
            self._quoted = False
        self._key, self._text, self._blank = None, [], True

    def _flush(self) -> str:
        if not self.named:
            return ""
        text, self._waiting = self._waiting, []
        return "".join(text)


def _may_be(text: str) -> bool:
    """Whether it may be blanks before a mark, or the beginning of one."""
    mark = text.lstrip()
    return not mark or BEGIN.startswith(mark)


def _string_of(text: str) -> str | None:
    """A JSON string's value, as UTF-8 can have it; ``None`` for all else, which is not even looked into."""
    if not text.startswith('"'):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return mended(value)
