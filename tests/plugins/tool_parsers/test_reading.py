"""What answers are read as: the formats as models write them, well or badly."""

from __future__ import annotations

import json

import pytest

from engine.core import Tool, ToolCall
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
