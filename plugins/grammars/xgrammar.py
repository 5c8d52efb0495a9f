"""``xgrammar``: grammars compiled by the library of that name, with masks that are quick to make.

Source: MLC's XGrammar, an Earley parser with masks made ahead for each state of a grammar; vLLM's and SGLang's default.
"""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.grammar import KINDS, Grammar, GrammarError, Vocabulary, Words
from engine.core.protocols import GrammarCompiler, PluginOptions
from engine.plugins.grammars._xgrammar_schema import rewritten
from engine.plugins.grammars._xgrammar_texts import check_ebnf, check_regex, split_lark
from engine.plugins.grammars._xgrammar_trial import Recipe, Trial, TrialLost, compiled, tokenizer_info, told, words_of

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

WORDS = 300  # characters of the library's messages that clients are told


class XGrammarOptions(PluginOptions):
    """Options of compiler ``xgrammar``."""

    whitespace: int = Field(
        32, ge=0, description="most blanks and line ends in a row in JSON; a small model may never stop otherwise"
    )
    compile_seconds: float = Field(2.0, gt=0, description="most seconds of a first try, in a process of its own")
    max_compiled_bytes: int = Field(16 << 20, ge=1, description="most memory of one compiled grammar")


class XGrammarCompiler(GrammarCompiler):
    """JSON schemas, regular expressions, choices, EBNF and Lark grammars. Needs pip install 'sixhooks[xgrammar]'."""

    name = "xgrammar"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    Options = XGrammarOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._info: TokenizerInfo | None = None
        self._trial: Trial | None = None
        self._texts: Words = np.zeros(0, np.int32)

    def missing(self) -> str | None:
        """The libraries, where they are not installed."""
        for name in ("xgrammar", "tvm_ffi"):
            if importlib.util.find_spec(name) is None:
                return f"{name} is not installed: pip install 'sixhooks[xgrammar]'"
        return None

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Import the library, here and in the process for first tries: some seconds. Raises ``TrialLost``."""
        words = words_of(vocabulary)
        trial = self._trial = Trial(words)  # at once: ``close`` may come meanwhile
        trial.start()
        try:
            info = tokenizer_info(words)
            trial.wait()
        except BaseException:
            trial.close()
            raise
        allowed = np.zeros(32 * vocabulary.words, np.bool_)
        allowed[[token for token, data in enumerate(words.tokens) if data]] = True
        allowed[words.ends] = True
        self._texts = np.packbits(allowed, bitorder="little").view(np.int32)
        self._info = info

    def compile(self, grammar: Grammar) -> XGrammarGrammar:
        """Takes tens of milliseconds, twice. Raises ``InvalidRequest`` with the library's words."""
        assert self._info is not None
        assert self._trial is not None
        try:
            recipe = self._recipe(grammar)
            words = self._trial.run(recipe, self.options.compile_seconds)
        except (ValueError, TrialLost) as error:
            raise InvalidRequest(grammar.field, f"cannot be compiled: {_short(str(error))}") from error
        if words is not None:
            code = "above_limit" if words.startswith("took more") else "invalid_value"
            raise InvalidRequest(grammar.field, _short(words), code=code)
        found = compiled(recipe, self._info)
        size, most = found.memory_size_bytes, self.options.max_compiled_bytes
        if size > most:
            words = f"takes {size} bytes compiled, at most {most} are allowed (max_compiled_bytes)"
            raise InvalidRequest(grammar.field, words, code="above_limit")
        return XGrammarGrammar(found, self._texts)

    def close(self) -> None:
        """End the process for first tries."""
        if self._trial is not None:
            self._trial.close()

    def _recipe(self, grammar: Grammar) -> Recipe:
        """Raises ``ValueError`` for what the library would ignore."""
        text, blanks = grammar.text, self.options.whitespace
        if grammar.kind == "json":
            return Recipe("json", rewritten(text), whitespace=blanks)
        if grammar.kind == "regex":
            check_regex(text)
            return Recipe("regex", text)
        if grammar.kind == "choice":
            return Recipe("ebnf", "root ::= " + " | ".join(map(_quoted, grammar.choices)))
        if grammar.kind == "ebnf":
            check_ebnf(text)
            return Recipe("ebnf", text)
        rules, schemas = split_lark(text)
        return Recipe("lark", rules, tuple(map(rewritten, schemas)), whitespace=blanks)


class XGrammarGrammar:
    """A grammar that compiles, shared by its matchers: what they read of it does not change."""

    def __init__(self, found: CompiledGrammar, texts: Words) -> None:
        self._compiled, self._texts = found, texts

    def matcher(self) -> XGrammarMatcher:
        """A new one, in less than a millisecond."""
        from xgrammar import GrammarMatcher

        return XGrammarMatcher(GrammarMatcher(self._compiled), self._texts)


class XGrammarMatcher:
    """Follows one output."""

    def __init__(self, matcher: GrammarMatcher, texts: Words) -> None:
        self._matcher, self._texts = matcher, texts

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""
        return bool(self._matcher.is_completed())

    def fill(self, mask: Words) -> None:
        """Set the bits of the tokens that may follow. Raises ``GrammarError``."""
        try:
            self._matcher.fill_next_token_bitmask(mask)
        except RuntimeError as error:
            raise GrammarError(f"the grammar cannot be followed: {_short(told(error))}") from error
        mask &= self._texts

    def accept(self, token: int) -> bool:
        """Go on by a token; False where it cannot follow."""
        return bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        self._matcher.rollback(count)


def _quoted(text: str) -> str:
    """A text in EBNF."""
    return json.dumps(text, ensure_ascii=False)


def _short(words: str) -> str:
    return words if len(words) <= WORDS else words[: WORDS - 3] + "..."
