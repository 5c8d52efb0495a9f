"""``pythonic``: an answer that is a list of Python calls, ``[search(query="a", limit=3)]``, as of Llama 3.2 and 4.

Source: the format of Meta's Llama 3.2 prompts; vLLM's parser of that name.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence

from engine.core.errors import InvalidRequest
from engine.core.grammar import Grammar
from engine.core.protocols import ToolParser
from engine.core.tools import TOO_DEEP, CallPiece, Heard, Tool, ToolCall, embedded, mended

MOST_BLANKS = 64
"""More of them in a row, or a name of more than 256 letters, and it is no list of calls: what is matched again with
each character stays short."""
BLANKS = rf"\s{{0,{MOST_BLANKS}}}"
BEGIN_MARK, END_MARK = "<|python_start|>", "<|python_end|>"
OPENING = re.compile(rf"{BLANKS}(?:{re.escape(BEGIN_MARK)})?{BLANKS}\[{BLANKS}")
CALL = re.compile(rf"{BLANKS}([A-Za-z_][\w.\-]{{0,255}}){BLANKS}\({BLANKS}")
KEYWORD = re.compile(rf"{BLANKS}([A-Za-z_]\w{{0,255}}){BLANKS}={BLANKS}")
CLOSING = re.compile(rf"{BLANKS}\]{BLANKS}")
ONLY_BLANKS = re.compile(BLANKS)
INSTRUCTIONS = (
    "You are an expert in composing functions. If a question can be answered by a function, answer with a list of "
    "calls and nothing else, in the format [function_name(name=value, name=value), function_name(name=value)]. "
    "Here are the functions, in JSON:\n\n{tools}"
)
PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(ToolParser):
    """A list of calls as Python writes them, when the answer begins with one; else all of it is content."""

    name = "pythonic"
    marks = (BEGIN_MARK, END_MARK)

    def stream(self) -> PythonicStream:
        """Reads one answer."""
        return PythonicStream()

    def grammar(self, tools: Sequence[Tool], *, parallel: bool, field: str) -> Grammar:
        """A list of one call, or of several, of these tools. Values are JSON, which ``stream`` reads like Python's."""
        more = ' (", " call)*' if parallel else ""
        rules = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call_{n}" for n in range(len(tools)))]
        for number, tool in enumerate(tools):
            if not CALL.fullmatch(f"{tool.name}("):
                raise InvalidRequest("tools", f"{tool.name!r} cannot be written as a Python call")
            rules += _call_rules(number, tool)
        return Grammar.lark("\n".join(rules), field=field)

    def instructions(self, tools: Sequence[Tool]) -> str:
        """The prompt of Llama 3.2."""
        return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.plain()["function"]) for tool in tools))

    def written(self, calls: Sequence[ToolCall]) -> str:
        """As the model writes them."""
        return "[" + ", ".join(f"{call.name}({_keywords(call.arguments)})" for call in calls) + "]"

    def answered(self, content: str) -> str:
        """What a function gave back."""
        return content


class PythonicStream:
    """Reads what is complete: an opening, a call's name, one argument after the other. So it does not matter how the
    text is cut: each part is told when the character after it shows that it is over.

    A call is told with its first argument, or when it closes without any; what does not go on as a list of calls from
    there on is content.
    """

    def __init__(self) -> None:
        self._text = ""  # not read yet
        self._read = self._opening
        self._said = ""  # of the list before any call was told; then of the call of which nothing was told yet
        self._index = -1
        self._name = ""
        self._count = 0  # arguments of the call that is being read
        self._literal = _Literal("", "")
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    def push(self, text: str) -> Heard:
        """More of the answer; what is certain of it. Mutates."""
        for character in text:
            if self._read == self._value and not self._literal.push(character):
                continue
            self._text += character
            while self._read():
                pass
        return self._take()

    def finish(self) -> Heard:
        """The answer is over: what was held back. Mutates."""
        if self._read == self._closed and not self._text.strip():
            self._text = ""
        self._content += [self._said, self._literal.begun if self._read == self._value else "", self._text]
        self._said = self._text = ""
        return self._take()

    def _take(self) -> Heard:
        heard = Heard("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return heard

    # ---- one after the other; each says whether there may be more to read in what is there

    def _opening(self) -> bool:
        if not (found := OPENING.match(self._text)) or found.end() == len(self._text):
            return self._wait(OPENING_BEGINNING)
        return self._go_on(found.end(), self._call)

    def _call(self) -> bool:
        if not (found := CALL.match(self._text)) or found.end() == len(self._text):
            return self._wait(CALL_BEGINNING)
        self._name, self._count = found[1], 0
        if self._index >= 0:
            self._said = found[0]
        return self._go_on(found.end(), self._argument)

    def _argument(self) -> bool:
        if self._text.lstrip().startswith(")"):
            self._close()
            return self._go_on(self._text.index(")") + 1, self._after_call)
        if not (found := KEYWORD.match(self._text)):
            return self._wait(KEYWORD_BEGINNING)
        self._literal = _Literal(found[1], found[0])  # nothing is behind it: it was found with its last character
        self._text, self._read = "", self._value
        return False

    def _value(self) -> bool:
        """The literal has ended, before the character that is there."""
        literal = self._literal
        begun = literal.begun
        try:
            value = _json_of(begun[literal.begin :])
        except ValueError:
            self._text = begun + self._text
            return self._give_up()
        self._tell(literal.name, value)
        return self._go_on(int(self._text == ","), self._argument)

    def _after_call(self) -> bool:
        if found := CLOSING.match(self._text):
            return self._go_on(found.end(), self._closed)
        if self._text.lstrip().startswith(","):
            return self._go_on(self._text.index(",") + 1, self._call)
        return self._wait(ONLY_BLANKS)

    def _closed(self) -> bool:
        rest = self._text.strip()
        if not END_MARK.startswith(rest) or len(self._text) - len(rest) > MOST_BLANKS:
            return self._give_up()
        if rest == END_MARK:
            self._text = ""
        return False

    def _anything(self) -> bool:
        self._content.append(self._text)
        self._text = ""
        return False

    # ---- what they have in common

    def _go_on(self, end: int, read: Callable[[], bool]) -> bool:
        if self._index < 0:
            self._said += self._text[:end]
        self._text, self._read = self._text[end:], read
        return bool(self._text)

    def _wait(self, beginning: re.Pattern[str]) -> bool:
        """Wait for more, where what is there may be the beginning of it; else it is no list of calls."""
        return False if beginning.fullmatch(self._text) else self._give_up()

    def _give_up(self) -> bool:
        """What follows a call that was told with this very character waits for the next one, for it comes after it."""
        begun = bool(self._calls)
        if self._count:
            self._close()
        self._text, self._said, self._read = self._said + self._text, "", self._anything
        return not begun

    def _tell(self, name: str, value: str) -> None:
        piece = f"{json.dumps(name)}: {value}"
        if self._count:
            self._calls.append(CallPiece(self._index, None, f", {piece}"))
        else:
            self._begin(f"{{{piece}")
        self._count += 1

    def _close(self) -> None:
        if self._count:
            self._calls.append(CallPiece(self._index, None, "}"))
        else:
            self._begin("{}")
        self._count = 0

    def _begin(self, arguments: str) -> None:
        self._index += 1
        self._said = ""
        self._calls.append(CallPiece(self._index, self._name, arguments))


BEGUN = "|".join(re.escape(BEGIN_MARK[:end]) for end in range(len(BEGIN_MARK) + 1))
OPENING_BEGINNING = re.compile(rf"{BLANKS}(?:{BEGUN})?(?:(?<=>){BLANKS})?\[?{BLANKS}")
CALL_BEGINNING = re.compile(rf"{BLANKS}(?:[A-Za-z_][\w.\-]{{0,255}}{BLANKS}\(?{BLANKS})?")
KEYWORD_BEGINNING = re.compile(rf"{BLANKS}(?:[A-Za-z_]\w{{0,255}}{BLANKS})?")


class _Literal:
    """Finds where a Python literal ends: at a comma or a bracket that is not its own. Looks at each character once.

    Args:
        name: of the argument.
        before: what stands before the literal and is held with it.
    """

    def __init__(self, name: str, before: str) -> None:
        self.name, self.begin = name, len(before)
        self._parts = [before]
        self._brackets: list[str] = []
        self._quote, self._escaped = "", False

    @property
    def begun(self) -> str:
        """All of it so far, from what stands before it."""
        return "".join(self._parts)

    def push(self, character: str) -> bool:
        """Whether the literal has ended before this character; else it is a part of it. Mutates."""
        if self._ends(character):
            return True
        self._parts.append(character)
        return False

    def _ends(self, character: str) -> bool:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in PAIRS:
            self._brackets.append(PAIRS[character])
        elif self._brackets and character == self._brackets[-1]:
            self._brackets.pop()
        else:
            return not self._brackets and character in ",)]}"
        return False


def _json_of(text: str) -> str:
    """A literal of JSON or of Python as JSON. Raises ``ValueError``; also for what JSON has no number for."""
    try:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = ast.literal_eval(text.strip())
        return mended(json.dumps(value, ensure_ascii=False, allow_nan=False))  # letters stay; surrogates do not
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no literal") from error


def _keywords(arguments: str) -> str:
    try:
        values = json.loads(arguments)
        return ", ".join(f"{name}={value!r}" for name, value in values.items()) if isinstance(values, dict) else ""
    except RecursionError as error:
        raise InvalidRequest("messages", f"a call's arguments: {TOO_DEEP}") from error
    except ValueError:
        return ""


def _call_rules(number: int, tool: Tool) -> list[str]:
    """``name(a=…, b=…)``: what is required, in its order, then what may be left out."""
    properties = dict(tool.schema.get("properties") or {})
    required = [name for name in tool.schema.get("required") or () if name in properties]
    optional = [name for name in properties if name not in required]
    shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    rules, places = [], {}
    for place, name in enumerate([*required, *optional]):
        if not KEYWORD.fullmatch(f"{name}="):
            raise InvalidRequest("tools", f"{name!r} of {tool.name!r} cannot be written as a Python argument")
        schema = properties[name] if isinstance(properties[name], dict) else {}
        places[name] = f"arg_{number}_{place}"
        rules.append(f"{places[name]}: {json.dumps(f'{name}=')} {places[name]}_value")
        rules.append(f"{places[name]}_value: {embedded({**shared, **schema})}")
    tail = "".join(f' (", " {places[name]})?' for name in optional)
    if required:
        inner = ' ", " '.join(places[name] for name in required) + tail
    else:
        starts = [
            places[name] + "".join(f' (", " {places[other]})?' for other in optional[at + 1 :])
            for at, name in enumerate(optional)
        ]
        inner = f"({' | '.join(starts)})?" if starts else ""
    return [f'call_{number}: {json.dumps(f"{tool.name}(")} {inner} ")"', *rules]
