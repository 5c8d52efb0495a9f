"""A grammar of token ids, for executors of any model: each token must follow from the one before."""

from __future__ import annotations

import numpy as np

from engine.core.grammar import Grammar, Vocabulary, Words
from engine.core.protocols import CompiledGrammar, GrammarCompiler, ModelInfo

RUNGS = 7


class Ladder(GrammarCompiler):
    """Token ids climb: each is one more than the one before, modulo 7. It never ends."""

    name = "ladder"
    kinds = ("regex",)

    def prepare(self, vocabulary: Vocabulary) -> None:
        """Remember how many there are."""
        self._size = vocabulary.size

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The same, whatever was asked for."""
        return Climb(self._size)


class Climb:
    """The compiled grammar, and its matcher."""

    accepting = False

    def __init__(self, size: int) -> None:
        ids = np.arange(32 * -(-size // 32))
        bits = np.stack([(ids % RUNGS == rung) & (ids < size) for rung in range(RUNGS)])
        self._masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._said = [0]

    def matcher(self) -> Climb:
        """A new one."""
        new = Climb.__new__(Climb)
        new._masks, new._said = self._masks, [0]
        return new

    def fill(self, mask: Words) -> None:
        """Those of the next rung."""
        mask |= self._masks[(self._said[-1] + 1) % RUNGS]

    def accept(self, token: int) -> bool:
        """Go on, if it is of the next rung."""
        if token % RUNGS != (self._said[-1] + 1) % RUNGS:
            return False
        self._said.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Climb down."""
        del self._said[len(self._said) - count :]


def climbs(output: list[int]) -> bool:
    """Whether an output is of the grammar."""
    return [token % RUNGS for token in output] == [(at + 1) % RUNGS for at in range(len(output))]


def vocabulary(model: ModelInfo) -> Vocabulary:
    """Of any model: texts do not matter here."""
    return Vocabulary(tokens=(), eos_ids=frozenset({0}), size=model.vocab_size)
