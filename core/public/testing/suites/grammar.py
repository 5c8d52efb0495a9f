"""What every compiler of grammars must do: allow what is right and nothing else, and go back as if nothing had been."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, NamedTuple

import numpy as np

from engine.core.errors import InvalidRequest
from engine.core.grammar import KINDS, Grammar, Vocabulary, unpacked
from engine.core.protocols import CompiledGrammar, GrammarCompiler, Matcher, Plugin
from engine.testing.guard import Violation
from engine.testing.suites.base import Suite

FIELD = "response_format"
LONGEST = 400  # tokens of a walk through a sample, all of which are short
PIECES = (b"ab", b'{"', b'":', b"true", b"null", b" ", b"12", b"\xc3\xa9", b"yes", b"no", b"maybe", b'","')
END, MARK = 0, 1


class Sample(NamedTuple):
    """A grammar, texts that are in it, and what tells whether a text is."""

    grammar: Grammar
    right: Sequence[str]
    check: Callable[[str], bool]

    def __str__(self) -> str:
        return f"{self.grammar.kind}-{len(self.grammar.text)}"


def vocabulary() -> Vocabulary:
    """A small one: an end, a mark, every byte, a few pieces, and an id that stands for nothing."""
    tokens = [b"<end>", b"<mark>", *(bytes([byte]) for byte in range(256)), *PIECES, b""]
    return Vocabulary(tokens=tokens, eos_ids=frozenset({END}), special_ids=frozenset({END, MARK}), size=len(tokens) + 3)


def _person(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "old"} and found["name"] in ("é", "ab") and type(found["old"]) is bool


def _list(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found, list) and len(found) <= 2 and all(one in (1, 12, None) for one in found)


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "ab"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": [1, 12, None]}, "maxItems": 2}
SAMPLES = (
    Sample(Grammar.json(PERSON, field=FIELD), ['{"name":"é","old":true}', '{"name":"ab","old":false}'], _person),
    Sample(Grammar.json(LIST, field=FIELD), ["[]", "[12,null]", "[1]"], _list),
    Sample(
        Grammar.regex(r"(ab|é)[0-9]{1,3}", field=FIELD),
        ["ab1", "é123"],
        lambda text: re.fullmatch(r"(ab|é)[0-9]{1,3}", text) is not None,
    ),
    Sample(Grammar.choice(["yes", "no", "maybe", "é"], field=FIELD), ["yes", "no", "maybe", "é"],
           lambda text: text in ("yes", "no", "maybe", "é")),
    Sample(Grammar.choice(["12", "true"], field=FIELD), ["12", "true"], lambda text: text in ("12", "true")),
    Sample(Grammar.lark('start: "a" inner? "b"\ninner: "(" start ")"', field=FIELD), ["ab", "a(ab)b"],
           lambda text: re.fullmatch(r"(a\()*ab(\)b)*", text) is not None and text.count("(") == text.count(")")),
    Sample(Grammar.ebnf('root ::= "é" inner? [b-d]\ninner ::= "(" root ")"', field=FIELD), ["éb", "é(éd)c"],
           lambda text: bool(re.fullmatch(r"(é\()*é[b-d](\)[b-d])*", text)) and text.count("(") == text.count(")")),
)  # fmt: skip
BAD = (
    Grammar(kind="json", text='{"type": "str"}', field=FIELD),
    Grammar(kind="json", text='{"type": "string", "pattern": "("}', field=FIELD),
    Grammar(kind="json", text='{"$ref": "#/$defs/nowhere"}', field=FIELD),
    Grammar(kind="regex", text="(ab", field=FIELD),
    Grammar(kind="lark", text="start: nowhere", field=FIELD),
    Grammar(kind="ebnf", text="root ::= nowhere", field=FIELD),
)


class GrammarSuite(Suite):
    """Rules of a grammar compiler, over a small vocabulary in which texts can be written in several ways."""

    role = "grammar"
    vocabulary: ClassVar[Vocabulary] = vocabulary()
    _compiler: ClassVar[GrammarCompiler | None] = None

    @classmethod
    def situations(cls) -> list[Sample]:
        """Samples of the kinds that it takes."""
        return [sample for sample in SAMPLES if sample.grammar.kind in cls().found().cls.kinds]  # type: ignore[attr-defined]

    @classmethod
    def teardown_class(cls) -> None:
        """Close the compiler that the rules shared."""
        if (compiler := cls.__dict__.get("_compiler")) is not None:
            cls._compiler = None
            compiler.close()

    def prepared(self) -> GrammarCompiler:
        """One that knows the vocabulary, for all rules: preparing may take seconds."""
        cls = type(self)
        if (known := cls.__dict__.get("_compiler")) is not None:
            return known  # type: ignore[no-any-return]
        compiler: GrammarCompiler = self.make()
        if (why := compiler.missing()) is not None:
            raise Violation(f"it cannot be tried here: {why}")
        compiler.prepare(self.vocabulary)
        cls._compiler = compiler
        return compiler

    def try_once(self, plugin: Plugin) -> None:
        """Compile something, and close."""
        assert isinstance(plugin, GrammarCompiler)
        plugin.prepare(self.vocabulary)
        for sample in self.situations()[:1]:
            plugin.compile(sample.grammar).matcher()
        plugin.close()

    # ---- rules

    def test_it_takes_something(self) -> None:
        """It says which kinds of grammar it takes, and there are no others."""
        kinds = self.make().kinds
        if not kinds or not set(kinds) <= set(KINDS):
            raise Violation(f"its kinds are {kinds!r}: some of {', '.join(KINDS)}")

    def test_whatever_it_allows_is_right(self, situation: Sample) -> None:
        """Whoever takes any allowed token at each step comes to an end, and has said what the grammar wants."""
        compiled = self.prepared().compile(situation.grammar)
        for seed in range(20):
            text = self._walk(compiled, random.Random(seed))
            try:
                right = situation.check(text)
            except ValueError:
                right = False
            if not right:
                raise Violation(f"{text!r} was allowed, which is wrong (walk {seed})")

    def test_what_is_right_is_allowed(self, situation: Sample) -> None:
        """Every text of the grammar can be said, in whatever tokens it is written."""
        compiled = self.prepared().compile(situation.grammar)
        for text in situation.right:
            for seed in range(4):
                matcher = compiled.matcher()
                for token in self._written(text.encode(), random.Random(seed)):
                    if not self._mask(matcher)[token] or not matcher.accept(token):
                        raise Violation(f"{text!r} is right, and its token {self.vocabulary.tokens[token]!r} forbidden")
                if not matcher.accepting:
                    raise Violation(f"{text!r} is complete, and may not end")

    def test_it_ends_where_it_is_complete(self, situation: Sample) -> None:
        """An end is allowed where the text is complete and nowhere else; marks and ids without a text never are."""
        compiled = self.prepared().compile(situation.grammar)
        for text in situation.right:
            matcher = compiled.matcher()
            for token in [None, *self._written(text.encode(), random.Random(0))]:
                if token is not None:
                    matcher.accept(token)
                mask = self._mask(matcher)
                if bool(mask[END]) != matcher.accepting:
                    said = "may" if mask[END] else "may not"
                    raise Violation(f"it {said} end in {text!r}, and accepting is {matcher.accepting}")
                others = [place for place in np.flatnonzero(mask).tolist() if place != END and not self._text(place)]
                if others:
                    raise Violation(f"ids that are no text are allowed: {others}")
                if not mask.any():
                    raise Violation(f"nothing is allowed in the middle of {text!r}")

    def test_what_is_taken_back_never_was(self, situation: Sample) -> None:
        """After a rollback everything is as if the tokens had never been, wherever it was, complete or not."""
        compiled = self.prepared().compile(situation.grammar)
        for seed in range(8):
            rng, matcher, said = random.Random(seed), compiled.matcher(), list[int]()
            for _ in range(30):
                if said and rng.random() < 0.4:
                    count = rng.randint(1, len(said))
                    matcher.rollback(count)
                    del said[len(said) - count :]
                elif (token := self._any(self._mask(matcher), rng)) != END:
                    matcher.accept(token)
                    said.append(token)
                fresh = compiled.matcher()
                for token in said:
                    fresh.accept(token)
                same = np.array_equal(self._mask(matcher), self._mask(fresh)) and matcher.accepting == fresh.accepting
                if not same:
                    raise Violation(f"after {self._said(said)!r} and rollbacks other tokens are allowed (walk {seed})")

    def test_matchers_are_strangers(self, situation: Sample) -> None:
        """Matchers of one grammar have nothing in common: what one follows the others do not see."""
        compiled = self.prepared().compile(situation.grammar)
        one, other = compiled.matcher(), compiled.matcher()
        before = self._mask(other)
        one.accept(self._any(self._mask(one), random.Random(1)))
        if not np.array_equal(before, self._mask(other)) or not np.array_equal(before, self._mask(compiled.matcher())):
            raise Violation("one matcher went on, and others went with it")

    def test_a_token_that_cannot_follow_is_told(self, situation: Sample) -> None:
        """``accept`` of a token that may not follow is False, and nothing has changed."""
        matcher = self.prepared().compile(situation.grammar).matcher()
        before = self._mask(matcher)
        for token in [place for place in np.flatnonzero(~before).tolist() if self._text(place)][::40]:
            if matcher.accept(token):
                raise Violation(f"{self.vocabulary.tokens[token]!r} cannot follow, and is accepted")
            if not np.array_equal(before, self._mask(matcher)):
                raise Violation(f"{self.vocabulary.tokens[token]!r} was not accepted, and something has changed")

    def test_what_is_no_grammar_is_refused(self) -> None:
        """What is no grammar is refused by ``InvalidRequest``, at the request's own field; the next one is compiled."""
        compiler = self.prepared()
        for bad in (grammar for grammar in BAD if grammar.kind in compiler.kinds):
            try:
                compiler.compile(bad)
            except InvalidRequest as error:
                if error.field != FIELD:
                    raise Violation(f"the field is {FIELD}, and {error.field!r} is blamed") from error
            else:
                raise Violation(f"{bad.text!r} is no {bad.kind}, and is compiled")
            for sample in self.situations()[:1]:
                compiler.compile(sample.grammar)

    def test_several_compile_at_once(self) -> None:
        """Threads that compile at once get what each of them would get alone."""
        compiler, samples = self.prepared(), self.situations()
        alone = [self._mask(compiler.compile(sample.grammar).matcher()) for sample in samples]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda sample: compiler.compile(sample.grammar), samples * 4))
        for number, compiled in enumerate(found):
            if not np.array_equal(self._mask(compiled.matcher()), alone[number % len(samples)]):
                raise Violation(f"{samples[number % len(samples)]} allows something else when others compile")

    # ---- inside

    def _mask(self, matcher: Matcher) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        mask = np.zeros(self.vocabulary.words, np.int32)
        matcher.fill(mask)
        return unpacked(mask, 32 * self.vocabulary.words)

    def _text(self, token: int) -> bytes:
        """What a token adds to the text: nothing, where it is a mark or unknown."""
        known = token < len(self.vocabulary.tokens) and token not in self.vocabulary.special_ids
        return self.vocabulary.tokens[token] if known else b""

    def _any(self, mask: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], rng: random.Random) -> int:
        return int(rng.choice(np.flatnonzero(mask)))

    def _walk(self, compiled: CompiledGrammar, rng: random.Random) -> str:
        matcher, said = compiled.matcher(), list[int]()
        for _ in range(LONGEST):
            mask = self._mask(matcher)
            if not mask.any():
                raise Violation(f"after {self._said(said)!r} nothing is allowed, not even an end")
            token = self._any(mask, rng)
            if token == END:
                return self._said(said).decode(errors="replace")
            if not matcher.accept(token):
                raise Violation(f"after {self._said(said)!r} token {token} is allowed, and not accepted")
            said.append(token)
        raise Violation(f"after {LONGEST} allowed tokens there is no end: {self._said(said)[:80]!r}")

    def _said(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._text, tokens))

    def _written(self, data: bytes, rng: random.Random) -> list[int]:
        """The text in tokens, one way of several."""
        ids = {piece: token for token, piece in enumerate(self.vocabulary.tokens) if token not in (END, MARK) and piece}
        tokens, at = [], 0
        while at < len(data):
            ends = [end for end in range(at + 1, len(data) + 1) if data[at:end] in ids]
            end = rng.choice(ends)
            tokens.append(ids[data[at:end]])
            at = end
        return tokens
