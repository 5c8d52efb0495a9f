"""What a request may say: a grammar as it is asked for, the model's vocabulary, and who follows one output."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import EngineError, one_line

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer
    from engine.core.protocols import Matcher, ModelInfo

Words = NDArray[np.int32]
"""A bit a token, ``[ceil(vocab_size / 32)]``: token t is allowed where bit t % 32 of word t // 32 is set."""

Kind = Literal["json", "regex", "choice", "lark", "ebnf"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EBNF_RULE = re.compile(r"^[^\S\n]*[A-Za-z_][\w.\-]*\s*::=", re.MULTILINE)
"""Blanks before it within its line: from each empty line over all those after it, a text of them would take hours."""


SLOW_MASK = 0.05  # seconds of processor time: a step waits for each of its masks
MOST_SLOW = 5  # such masks of one request


class GrammarError(EngineError):
    """A grammar cannot be followed any further: the request ends, and nobody else is touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output must be, to its last token.

    Args:
        kind: ``json`` (a JSON schema), ``regex``, ``choice`` (a JSON list of texts), ``lark`` (a Lark grammar),
            ``ebnf`` (a grammar in EBNF as llama.cpp's GBNF writes it).
        text: the grammar itself.
        field: the request's field that it came from, which errors name.
    """

    kind: Kind
    text: str
    field: str = "grammar"

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None, *, field: str = "grammar") -> Grammar:
        """JSON that validates against a schema; without one, any object."""
        if not isinstance(schema, str):
            schema = json.dumps({"type": "object"} if schema is None else schema)
        return cls(kind="json", text=schema, field=field)

    @classmethod
    def regex(cls, pattern: str, *, field: str = "grammar") -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls(kind="regex", text=pattern, field=field)

    @classmethod
    def choice(cls, texts: Iterable[str], *, field: str = "grammar") -> Grammar:
        """One of several texts."""
        return cls(kind="choice", text=json.dumps(list(texts)), field=field)

    @classmethod
    def lark(cls, rules: str, *, field: str = "grammar") -> Grammar:
        """Text by a context-free grammar in Lark's notation, from its rule ``start``."""
        return cls(kind="lark", text=rules, field=field)

    @classmethod
    def ebnf(cls, rules: str, *, field: str = "grammar") -> Grammar:
        """Text by a context-free grammar in EBNF (GBNF), from its rule ``root``."""
        return cls(kind="ebnf", text=rules, field=field)

    @classmethod
    def rules(cls, rules: str, *, field: str = "grammar") -> Grammar:
        """Text by a context-free grammar in EBNF where rules are defined by ``::=``, else in Lark's notation."""
        return (cls.ebnf if EBNF_RULE.search(rules) else cls.lark)(rules, field=field)

    @property
    def choices(self) -> list[str]:
        """The texts of kind ``choice``."""
        texts: list[str] = json.loads(self.text)
        return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a grammar's compiler must know of the tokens.

    Args:
        tokens: what each token adds to the text; empty where it has none.
        eos_ids: tokens that end an output: allowed where the grammar is complete, and nowhere else.
        special_ids: tokens that are marks and not text: never allowed, but for the ends.
        size: token ids are below this; the model may have more than there are ``tokens``.
    """

    tokens: Sequence[bytes]
    eos_ids: frozenset[int]
    special_ids: frozenset[int] = frozenset()
    size: int

    @property
    def words(self) -> int:
        """Length of a mask of it."""
        return -(-self.size // 32)


def vocabulary_of(tokenizer: Tokenizer, model: ModelInfo) -> Vocabulary:
    """The vocabulary of a served model. Takes a few tenths of a second."""
    tokens = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, model.vocab_size))]
    ends = frozenset(token for token in model.eos_ids if token < model.vocab_size)
    special = frozenset(token for token in tokenizer.special_ids if token < model.vocab_size)
    return Vocabulary(tokens=tokens, eos_ids=ends, special_ids=special, size=model.vocab_size)


class Guide:
    """Says which tokens one request may say next. What it answers follows from the output so far and nothing else.

    So nobody has to tell it of preemptions, failed steps, or drafts that were rejected: the executor says what the
    output is, with what a step in flight has sampled, and the matcher goes back and on from where it was. Belongs to
    whoever executes; not thread-safe.
    """

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._ends = vocabulary.eos_ids
        self._mask: Words = np.zeros(vocabulary.words, np.int32)
        self._end_only = np.zeros_like(self._mask)
        for token in self._ends:
            self._end_only[token // 32] |= np.array(1 << token % 32, np.uint32).view(np.int32)
        self._seen: list[int] = []
        self._fed = 0  # so many of them the matcher has: all, or those before the end
        self._certain = 0
        self._slow = 0

    def allowed(self, tokens: Sequence[int], first: int, committed: int, pending: Sequence[int] = ()) -> Words:
        """The mask of the next token; valid until the next call. Mutates what is remembered, not the arguments.

        Args:
            tokens: the request's, of which those from ``first`` to ``committed`` are certain output.
            pending: what comes after those: sampled by a step in flight, or drafts to try.

        Raises:
            GrammarError: the output is none of the grammar's, or the grammar became too complex to follow, or too slow.
        """
        try:
            self._follow(tokens, first, committed, pending)
            if self._fed < len(self._seen):
                return self._end_only
            self._mask.fill(0)
            began = time.thread_time()
            self._matcher.fill(self._mask)
        except GrammarError:
            raise
        except Exception as error:  # of a library: this request's trouble, and nobody else's
            raise GrammarError(f"the grammar cannot be followed: {one_line(error)}") from error
        self._slow += time.thread_time() - began > SLOW_MASK
        if self._slow >= MOST_SLOW:
            raise GrammarError(f"{MOST_SLOW} masks of the grammar took more than {SLOW_MASK:g} s each")
        return self._mask

    def _follow(self, tokens: Sequence[int], first: int, committed: int, pending: Sequence[int]) -> None:
        sure = min(self._certain, committed - first)
        new = [*tokens[first + sure : committed], *pending]
        old = self._seen[sure:]
        keep = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if len(old) > keep:
            self._go_back(sure + keep)
        for token in new[keep:]:
            self._accept(token)
        self._certain = committed - first

    def _go_back(self, length: int) -> None:
        if self._fed > length:
            self._matcher.rollback(self._fed - length)
            self._fed = length
        del self._seen[length:]

    def _accept(self, token: int) -> None:
        if self._fed == len(self._seen) and not (token in self._ends and self._matcher.accepting):
            if not self._matcher.accept(token):
                raise GrammarError(f"token {token} cannot follow in the grammar")
            self._fed += 1
        self._seen.append(token)  # after the end anything is seen, and only ends are allowed


def unpacked(mask: Words, size: int) -> NDArray[np.bool_]:
    """A mask, or several ``[rows, words]``, as one truth a token."""
    bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), axis=-1, count=size, bitorder="little")
    return bits.view(np.bool_)
