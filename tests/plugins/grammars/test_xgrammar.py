"""xgrammar ignores what it does not support and may compile for ever: here the first is refused and the second ends."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.util import find_spec

import numpy as np
import pytest

from engine.core import Grammar, InvalidRequest, SamplingParams
from engine.core.registry import make
from engine.testing import make_core
from engine.testing.suites.grammar import END, LIST, vocabulary

pytestmark = pytest.mark.skipif(
    not (find_spec("xgrammar") and find_spec("tvm_ffi")), reason="needs pip install 'sixhooks[xgrammar]'"
)
VOCABULARY = vocabulary()
BYTES = {data: token for token, data in reversed([*enumerate(VOCABULARY.tokens)]) if len(data) == 1}
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


@pytest.fixture(scope="module")
def compiler():
    made = make("grammar", "xgrammar")
    made.prepare(VOCABULARY)
    yield made
    made.close()


def accepts(compiled, text):
    """Whether a text is in a grammar."""
    matcher = compiled.matcher()
    return _goes_on(matcher, text) and matcher.accepting


def follows(compiled, text):
    """Whether a text of a grammar may begin so."""
    return _goes_on(compiled.matcher(), text)


def _goes_on(matcher, text):
    """Byte by byte, each of which the mask allows."""
    for byte in text.encode():
        token, mask = BYTES[bytes([byte])], np.zeros(VOCABULARY.words, np.int32)
        matcher.fill(mask)
        allowed = bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)
        assert matcher.accept(token) == allowed
        if not allowed:
            return False
    return True


def named(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


KEPT = [
    ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"b":1}']),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["b"], "additionalProperties": NUMBER},
     ['{"b":1}', '{"a":"x","b":1}'], ['{"a":"x"}', '{"b":"x"}']),
    ({"properties": {"a": TEXT}, "required": ["a"]}, ['{"a":"x"}'], ["{}", "1"]),
    ({"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null"], ['"abc"', "1"]),
    ({"type": "array", "prefixItems": [TEXT, NUMBER], "items": False}, ['["a",1]'], ['["a",1,2]', "[1]"]),
    ({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
      "$ref": "#/$defs/n"}, ['{"n":{"n":{}}}'], ['{"n":1}']),
    ({"oneOf": [TEXT, NUMBER]}, ['"a"', "1"], ["null"]),
    ({"oneOf": [named(kind={"const": "a"}, a=TEXT), named(kind={"const": "b"}, b=NUMBER)]},
     ['{"kind":"a","a":"x"}', '{"kind":"b","b":1}'], ['{"kind":"a","b":1}']),
    ({"enum": ["a", None], "type": ["string", "null"]}, ['"a"', "null"], ['"b"']),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"d"', '""']),
    ({"type": "string", "format": "date"}, ['"2020-01-31"'], ['"2020-13-01"']),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 7}, ["4", "7"], ["3", "8"]),
    ({"$schema": "x", "$id": "y", "title": "t", "type": "boolean", "default": True}, ["true"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), KEPT, ids=[json.dumps(schema)[:40] for schema, _, _ in KEPT])
def test_schemas_that_it_keeps_to(compiler, schema, right, wrong):
    compiled = compiler.compile(Grammar.json(schema))
    assert [text for text in right if not accepts(compiled, text)] == []
    assert [text for text in wrong if accepts(compiled, text)] == []


REFUSED = [
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
    ({"type": "integer", "multipleOf": 3}, "'multipleOf' is not supported"),
    ({"not": TEXT}, "'not' is not supported"),
    ({"if": TEXT, "then": {}}, "'if' is not supported"),
    ({"allOf": [TEXT, NUMBER]}, "'allOf' of several schemas"),
    ({"oneOf": [NUMBER, {"type": "number"}]}, "'oneOf' is supported where"),
    ({"oneOf": [named(a=TEXT), named(b=TEXT)]}, "'oneOf' is supported where"),
    ({"type": "object", "patternProperties": {"^x": TEXT}}, "'patternProperties' is not supported"),
    ({"type": "string", "pattern": "a+", "maxLength": 2}, "'pattern' beside minLength or maxLength"),
    ({"type": "string", "format": "date", "pattern": "a"}, "'pattern' beside format"),
    ({"type": "string", "format": "colour"}, "format 'colour'"),
    ({"type": "string", "pattern": '"'}, "what JSON escapes"),
    ({"type": "string", "pattern": r"\\"}, "what JSON escapes"),
    ({"type": "string", "pattern": "a^b"}, "#/pattern: anchors"),
    ({"maxLength": 2}, "needs 'type': 'string' beside it"),
    ({"minimum": 2}, "needs 'type': 'number' beside it"),
    ({"enum": ["abc"], "maxLength": 2}, "'enum' beside 'maxLength'"),
    ({"enum": ["a", 1], "type": "string"}, "1 is not of type 'string'"),
    ({"anyOf": [TEXT], "maxLength": 2}, "'anyOf' beside 'maxLength'"),
    ({"$ref": "#/$defs/a", "maxLength": 2, "$defs": {"a": TEXT}}, "'\\$ref' beside 'maxLength'"),
    ({"$ref": "#/$defs/a", "$defs": {"b": TEXT}}, "there is no schema"),
    ({"$ref": "#/$defs", "$defs": {"type": TEXT}}, "there is no schema"),
    ({"$ref": "http://a/b"}, "references begin with '#/'"),
    ({"$ref": "#"}, "Circular"),
    ({"type": "object", "properties": {"a": {"type": "str"}}}, "#/properties/a: type 'str'"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is required, and not allowed"),
    ({"type": "array", "minItems": -1}, "'minItems' must be a whole number"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength 3 is greater than maxLength 2"),
    ({"type": "string", "nullable": True}, "'nullable' is not supported"),
    ({"type": []}, "type \\[\\]"),
    ({"oneOf": [{"type": 5}, TEXT]}, "#/oneOf/0: type 5"),
    ({"oneOf": [{"$ref": "#/x"}, TEXT]}, "'oneOf' is supported where"),
    ({"type": "string", "format": []}, "format \\[\\] is not supported"),
    ({"enum": [10**400], "type": "string"}, "is not of type 'string'"),
    ({"anyOf": []}, "at least one schema"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[json.dumps(schema)[:40] for schema, _ in REFUSED])
def test_schemas_that_it_would_not_keep_to_are_refused(compiler, schema, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        compiler.compile(Grammar.json(schema, field="response_format"))
    assert refused.value.field == "response_format"
    assert ".cc" not in str(refused.value)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.regex("(a"), "parenthesis is not closed"),
        (Grammar.regex("(?=a)b"), "Lookahead is not supported"),
        (Grammar.regex("a$b"), "anchors"),
        (Grammar.regex(r"\ud800"), "four digits that are a character"),
        (Grammar.ebnf('root ::= "a" (= "b")'), "lookahead"),
        (Grammar.ebnf("root ::= Token(5)"), "macro 'Token'"),
        (Grammar.ebnf('root ::= TagDispatch(("a", root))'), "macro 'TagDispatch'"),
        (Grammar.ebnf('root[max_tokens=3] ::= "a"'), "attributes"),
        (Grammar.ebnf('start ::= "a"'), "root"),
        (Grammar.lark("start: <[5]>"), "special tokens"),
        (Grammar.lark('start: a\na[stop="x"]: /[a-z]+/'), "attributes"),
        (Grammar.lark('start: "a" %json {"type": "integer", "multipleOf": 2}'), "'multipleOf' is not supported"),
        (Grammar.lark('start: "a" %json {"type": '), "%json: is not valid JSON"),
        (Grammar.lark("start: /a^b/"), "anchors"),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else "",
)
def test_grammars_that_it_would_not_keep_to_are_refused(compiler, grammar, words):
    with pytest.raises(InvalidRequest, match=words):
        compiler.compile(grammar)


def test_what_only_looks_like_it_is_compiled(compiler):
    assert accepts(compiler.compile(Grammar.ebnf('root ::= "(=" a ("b" | a) # TagDispatch(\na ::= [(=]')), "(=((")
    lark = 'start: "%json {" a /[@<]/ // <x>\na: %json {"type": "integer", "x-guidance": {"a": 1}} "]:"'
    assert accepts(compiler.compile(Grammar.lark(lark)), "%json {12]:@")
    assert accepts(compiler.compile(Grammar.regex(r"^a\^[$^]b$")), "a^$b")


def test_schemas_that_refer_to_themselves_in_all_places_are_told_at_once(compiler):
    """Comparing branches and writing out what is required must not grow beyond the schema."""
    names = [f"p{n}" for n in range(300)]
    wheel = {"type": "object", "properties": {name: {"$ref": "#/$defs/w"} for name in names}, "required": names}
    with pytest.raises(InvalidRequest, match="'oneOf' is supported where"):
        compiler.compile(Grammar.json({"$defs": {"w": wheel}, "oneOf": [wheel, {**wheel, "title": "x"}]}))
    schema = NUMBER
    for _ in range(10):
        schema = {"type": "object", "required": names[:4], "additionalProperties": schema}
    deep = compiler.compile(Grammar.json(schema))
    assert follows(deep, '{"p0":{"p0":{"p0":')
    assert not follows(deep, '{"p0":1')


def wide(count):
    """Optional properties: the library's work grows with the square of their number."""
    return {"type": "object", "properties": {f"p{n}": {"type": ["string", "null"]} for n in range(count)}}


def test_one_that_takes_too_long_ends_and_leaves_no_thread_behind():
    made = make("grammar", "xgrammar", {"compile_seconds": 0.4})
    core = make_core(
        executor=make("executor", "sim", {"eos_id": END, "vocab_size": VOCABULARY.size}),
        grammar=made, vocabulary=VOCABULARY,
    )  # fmt: skip
    try:
        other = core.add([7] * 3, SamplingParams(max_tokens=30, ignore_eos=True))
        slow = [core.add([n], SamplingParams(grammar=Grammar.json(wide(1500 + n)))) for n in range(2)]
        good = core.add([1], SamplingParams(max_tokens=60, grammar=Grammar.json(LIST)))
        while core.has_work:
            core.step()
        assert {request.finish for request in slow} == {"error"}
        assert all("took more than 0.4 s to compile (compile_seconds)" in request.detail for request in slow)
        assert (other.finish, good.finish) == ("length", "stop")
        assert isinstance(json.loads(b"".join(VOCABULARY.tokens[token] for token in good.output[:-1])), list)
        bad = core.add([1], SamplingParams(grammar=Grammar.json({"$ref": "#"})))
        again = core.add([1], SamplingParams(max_tokens=60, grammar=Grammar.json(LIST)))
        while core.has_work:
            core.step()
        assert (bad.finish, again.output) == ("error", good.output)
        _its_process_ends(made)
    finally:
        core.close()


def _its_process_ends(made):
    """Whoever asks meanwhile is refused; another process begins."""
    old = made._trial._process.pid
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + 120
    compiled, words = None, []
    while compiled is None:
        assert time.monotonic() < deadline
        try:
            compiled = made.compile(Grammar.choice(["ab"]))
        except InvalidRequest as error:
            words.append(str(error))
            time.sleep(0.05)
    assert all("process" in word for word in words)
    assert accepts(compiled, "ab")
    assert made._trial._process.pid != old


def test_one_that_takes_much_memory_is_refused(compiler):
    small = make("grammar", "xgrammar", {"max_compiled_bytes": 1000})
    small._info, small._trial, small._texts = compiler._info, compiler._trial, compiler._texts
    with pytest.raises(InvalidRequest, match="at most 1000 are allowed") as refused:
        small.compile(Grammar.json(LIST))
    assert refused.value.code == "above_limit"
