"""``llguidance``: grammars compiled by the library of that name, which needs nothing else.

Source: guidance-ai's llguidance, an Earley parser over a trie of the vocabulary, as in vLLM's backend "guidance".
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.grammar import KINDS, Grammar, GrammarError, Vocabulary, Words
from engine.core.protocols import GrammarCompiler, PluginOptions

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

WORDS = 300  # characters of the library's messages that clients are told
JSON_SPACE = r"[\x20\x0A\x0D\x09]"


class LLGuidanceOptions(PluginOptions):
    """Options of compiler ``llguidance``."""

    whitespace: int = Field(
        32, ge=0, description="most blanks and line ends in a row in JSON; a small model may never stop otherwise"
    )
    max_grammar_symbols: int = Field(100_000, ge=1, description="most symbols of a compiled grammar")
    max_lexer_states: int = Field(50_000, ge=1, description="most states of its lexer (1 to 2 kB each)")
    compile_fuel: int = Field(1_000_000, ge=1, description="most work of its lexer while compiling (no bound on time)")
    step_fuel: int = Field(200_000, ge=1, description="most work of its lexer for one mask (no bound on time)")


class LLGuidanceCompiler(GrammarCompiler):
    """JSON schemas, regular expressions, choices and Lark grammars. Needs pip install 'sixhooks[grammar]'."""

    name = "llguidance"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    Options = LLGuidanceOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._tokenizer: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None

    def missing(self) -> str | None:
        """The library, where it is not installed."""
        if importlib.util.find_spec("llguidance") is None:
            return "llguidance is not installed: pip install 'sixhooks[grammar]'"
        return None

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Build the trie of the vocabulary, in a few tenths of a second."""
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        ends = sorted(vocabulary.eos_ids)
        wrapper = TokenizerWrapper(_Tokens(vocabulary, ends[0]))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=vocabulary.size, eos_token=ends)
        options = self.options
        self._limits = LLParserLimits(
            initial_lexer_fuel=options.compile_fuel,
            step_lexer_fuel=options.step_fuel,
            max_lexer_states=options.max_lexer_states,
            max_grammar_size=options.max_grammar_symbols,
            verbose_errors=False,
        )

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        """Takes one to a few milliseconds; the options bound the work, and whoever calls it the time. Raises
        ``InvalidRequest`` with the library's words."""
        from llguidance import LLMatcher

        assert self._tokenizer is not None
        try:
            source = self._source(grammar)
        except ValueError as error:
            raise InvalidRequest(grammar.field, _short(str(error))) from error
        new = partial(LLMatcher, self._tokenizer, source, log_level=0, limits=self._limits)
        matcher = new()
        words = matcher.get_error() or "; ".join(matcher.get_grammar_warnings())
        if not words and grammar.kind == "lark":
            words = _not_followed(matcher)
        if words:
            raise InvalidRequest(grammar.field, f"cannot be compiled: {_short(words)}")
        return LLGuidanceGrammar(matcher, new)

    def _source(self, grammar: Grammar) -> str:
        from llguidance import LLMatcher

        if grammar.kind == "json":
            most = self.options.whitespace
            pattern = {"whitespace_pattern": f"{JSON_SPACE}{{0,{most}}}"} if most else {"whitespace_flexible": False}
            return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=pattern))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        if grammar.kind == "choice":
            return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, grammar.choices))))
        return str(LLMatcher.grammar_from_lark(grammar.text))


class LLGuidanceGrammar:
    """A grammar that compiles. Each matcher compiles it anew: copies would share the states of a lexer, and its limits,
    so that an output that runs into them would take all others with it."""

    def __init__(self, first: LLMatcher, new: Callable[[], LLMatcher]) -> None:
        self._first, self._new = [first], new

    def matcher(self) -> LLGuidanceMatcher:
        """A new one; for whoever asks first that which the grammar was tried with."""
        try:
            return LLGuidanceMatcher(self._first.pop())
        except IndexError:
            return LLGuidanceMatcher(self._new())


class LLGuidanceMatcher:
    """Follows one output."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_accepting())

    def fill(self, mask: Words) -> None:
        """Set the bits of the tokens that may follow. Raises ``GrammarError``."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> bool:
        """Go on by a token; False where it cannot follow."""
        if self._matcher.validate_tokens([token]) == 0:
            self._check()
            return False
        self._matcher.consume_token(token)
        self._check()
        return True

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        self._matcher.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_short(self._matcher.get_error())}")


class _Tokens:
    """The vocabulary as the library wants it. It asks for the tokens of a text only to find those of forced text."""

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        missing = vocabulary.size - len(vocabulary.tokens)
        self.tokens: Sequence[bytes] = [*vocabulary.tokens, *[b""] * missing]
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_ids})
        self._longest = max(map(len, self.tokens))
        self._ids = {data: token for token, data in reversed([*enumerate(self.tokens)]) if data}
        for token in self.special_token_ids:
            if self._ids.get(self.tokens[token]) == token:
                del self._ids[self.tokens[token]]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                at += 1
                continue
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def _not_followed(matcher: LLMatcher) -> str:
    """Why outputs of a grammar cannot be taken back (it has rules with ``max_tokens=`` or ``stop=``); else nothing."""
    token = next((at for at, bias in enumerate(matcher.compute_logit_bias()) if bias), None)
    if token is not None and matcher.consume_token(token):
        matcher.rollback(1)
    return str(matcher.get_error()).partition("\n")[0]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _short(words: str) -> str:
    words = " ".join(words.split())
    return words if len(words) <= WORDS else words[: WORDS - 3] + "..."
