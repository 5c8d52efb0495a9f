"""What answers are read as: the formats as models write them, well or badly."""

from __future__ import annotations

import json

import pytest

from engine.core import Tool, ToolCall
from engine.core.errors import InvalidRequest
from engine.core.models.chat import ChatTemplate
from engine.core.registry import make
from engine.core.tools import rendered
from engine.testing.suites.tool_parser import joined


def read(name, text):
    stream = make("tool_parser", name).stream()
    whole = joined([stream.push(text), stream.finish()])
    return whole.content, [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ('Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n', "Let me see.", [("f", "{}")]),
        ('<tool_call>[{"name":"f","arguments":{}},{"name":"g","arguments":{"x":"]"}}]</tool_call>', "",
         [("f", "{}"), ("g", '{"x":"]"}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": "}"}}</tool_call>', "", [("f", '{"a": "}"}')]),
        ('<tool_call>{"arguments": {"a": 1} , "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),  # the mark is forgotten
        ('<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a":')]),  # cut
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ('<tool_call>{"a": 1}</tool_call>!', '<tool_call>{"a": 1}</tool_call>!', []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("1 <tool_cal> 2", "1 <tool_cal> 2", []),
        ("tail \n<tool_c", "tail \n<tool_c", []),
        ("   ", "   ", []),
    ],
)  # fmt: skip
def test_hermes(text, content, calls):
    found = read("hermes", text)
    assert (found[0], [(name, arguments.rstrip()) for name, arguments in found[1]]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello", "Hello", []),
        ("[f(a=1)]", "", [("f", {"a": 1})]),
        (" [f(a='it\\'s', b=[True, None, {'k': 1.5}]), g()]\n", "",
         [("f", {"a": "it's", "b": [True, None, {"k": 1.5}]}), ("g", {})]),
        ('[f(a=true, b="x, y")]', "", [("f", {"a": True, "b": "x, y"})]),
        ("<|python_start|>[f()]<|python_end|>", "", [("f", {})]),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[see(below)]", "[see(below)]", []),
        ("[f(a=1), see(below)]", "see(below)]", [("f", {"a": 1})]),  # all of the call that is none
        ("[f(a=1), g(", "g(", [("f", {"a": 1})]),
        ("[f(), g(b='x", "g(b='x", [("f", {})]),
        ("[link](url) and more", "[link](url) and more", []),
        ("[f(a=1, b=nonsense)]", " b=nonsense)]", [("f", {"a": 1})]),
        ("[f(a=1)] and so on", "and so on", [("f", {"a": 1})]),
    ],
)  # fmt: skip
def test_pythonic(text, content, calls):
    found = read("pythonic", text)
    assert (found[0].lstrip() if calls else found[0], [(name, json.loads(args)) for name, args in found[1]]) == (
        content.lstrip() if calls else content,
        calls,
    )


MANY = 200_000


@pytest.mark.timeout(60)  # each takes a second where the work grows with the text, and minutes where with its square
@pytest.mark.parametrize(
    ("name", "before", "run", "after", "calls"),
    [
        ("pythonic", "[", "a", "(b=1)]", []),
        ("pythonic", "[", " ", "f(b=1)]", []),
        ("pythonic", "[f(", " ", "b=1)]", []),
        ("pythonic", "[f(", "b", "=1)]", []),
        ("pythonic", "[f(b=1)", " ", "]", [("f", '{"b": 1}')]),
        ("pythonic", "[f(b=1)]", " ", "", [("f", '{"b": 1}')]),
        ("pythonic", "[f(b='", "a", "')]", [("f", json.dumps({"b": "a" * MANY}))]),
        ("hermes", "", " ", "x", []),
        ("hermes", "<tool_call>", " ", "x", []),
        ("hermes", '<tool_call>{"name": "', "f", '"}', [("f" * MANY, "{}")]),
        ("hermes", '<tool_call>{"arguments": {"b": "', "a", '"}, "name": "f"}', [("f", json.dumps({"b": "a" * MANY}))]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "', "a", '"}}', [("f", json.dumps({"b": "a" * MANY}))]),
    ],
)  # fmt: skip
def test_a_long_run_is_read_as_fast_as_a_short_one(name, before, run, after, calls):
    text = f"{before}{run * MANY}{after}"
    content, found = read(name, text)
    assert found == calls
    if not calls:
        assert content == text


@pytest.mark.parametrize(
    ("name", "begin", "run"),
    [("pythonic", "[", "a"), ("pythonic", "[f(", " "), ("pythonic", "[f()", " "), ("pythonic", "[f()]", "\n"),
     ("hermes", "", "\n"), ("hermes", "Hm.", " ")],
)  # fmt: skip
def test_what_no_call_begins_with_is_not_held(name, begin, run):
    stream = make("tool_parser", name).stream()
    told = [stream.push(begin), *(stream.push(run) for _ in range(1000))]
    assert joined(told).content.count(run) > 1000 - 300


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("pythonic", '[f(a="\\ud800b")]', [("f", {"a": "\ufffdb"})]),
        ("pythonic", "[f(a='\\ud83d\\ude00ö\\udc00')]", [("f", {"a": "\U0001f600ö\ufffd"})]),
        ("pythonic", "[f(a={'\\ud800': 1})]", [("f", {"a": {"\ufffd": 1}})]),
        ("hermes", '<tool_call>{"name": "f\\ud800", "arguments": "{\\"a\\": \\"\\udc00\\"}"}',
         [("f\ufffd", {"a": "\ufffd"})]),
    ],
)  # fmt: skip
def test_half_a_pair_of_surrogates_can_be_told(name, text, calls):
    found = read(name, text)[1]
    assert [(call, json.loads(arguments.encode())) for call, arguments in found] == calls


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[1, -1e999]", "[" * 2000, "[" * 2000 + "]" * 2000])
def test_what_json_has_no_value_for_is_content(value):
    content, calls = read("pythonic", f"[f(a={value})]")
    assert (content, calls) == (f"[f(a={value})]", [])


def test_a_name_that_is_nested_deeply_is_no_name():
    text = '<tool_call>{"name": ' + "[" * 2000 + "]" * 2000 + ', "arguments": {}}</tool_call>'
    assert read("hermes", text) == (text, [])


DEEP = "[" * 2000 + "]" * 2000


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}{{ m.content }}{% endfor %}",
     "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
     "{% endfor %}{% endfor %}"],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [DEEP, f'{{"a": {DEEP}}}'])
def test_arguments_that_are_nested_too_deeply_are_the_clients_fault(source, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InvalidRequest, match="messages: .* nested too deeply"):
        rendered(Templated(source), make("tool_parser", "pythonic"), messages)


def test_a_schema_that_is_nested_too_deeply_is_the_clients_fault():
    schema = {}
    for _ in range(2000):
        schema = {"items": schema}
    tool = Tool("f", "", {"type": "object", "properties": {"a": schema}, "required": ["a"]})
    for name in ("hermes", "pythonic"):
        with pytest.raises(InvalidRequest, match="tools: .*nested too deeply"):
            make("tool_parser", name).grammar([tool], parallel=True, field="tools")
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        rendered(Templated("{{ messages }}"), make("tool_parser", "hermes"), [{"role": "user", "content": "x"}], [tool])


class Templated:
    """A tokenizer that only renders."""

    def __init__(self, source):
        self.template = ChatTemplate(source, {})
        self.takes_tools = self.template.takes_tools

    def render_chat(self, messages, **more):
        return self.template.render(messages, **more)


def test_a_template_that_knows_tools_is_given_them_as_values():
    """As transformers gives them: arguments are values, not text; and who answers has a name."""
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.name }}){% endif %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    odd = {"id": "d", "type": "function", "function": {"name": "g", "arguments": "no JSON"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        {"role": "tool", "content": "ok", "tool_call_id": "c"},
    ]
    text = rendered(Templated(source), None, messages, [Tool("f", "does", {"type": "object"})])
    offered = {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
    assert text == f'{json.dumps([offered])}|user:hi|assistant:f={{"a": 1}}g="no JSON"|tool:ok(f)'
    assert call["function"]["arguments"] == '{"a": 1}'  # not mutated


def test_instructions_join_the_systems_own_words():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    hermes = make("tool_parser", "hermes")
    tool = Tool("f")
    text = rendered(Templated(source), hermes, messages, [tool])
    assert text == f"<system>Be kind.\n\n{hermes.instructions([tool])}<user>hi"
    assert messages[0]["content"] == "Be kind."
    assert rendered(Templated(source), hermes, messages) == "<system>Be kind.<user>hi"


def test_what_cannot_be_written_as_python_is_refused():
    pythonic = make("tool_parser", "pythonic")
    odd = {"type": "object", "properties": {"a-b": {"type": "string"}}}
    with pytest.raises(ValueError, match="tools: 'a-b' of 'f' cannot be written"):
        pythonic.grammar([Tool("f", "", odd)], parallel=True, field="tools")
    assert pythonic.written([ToolCall("f", "no JSON")]) == "[f()]"
