"""Compilers of grammars: which tokens may come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from engine.core.grammar import Grammar, Vocabulary, Words
from engine.core.protocols.plugin import Plugin


class Matcher(Protocol):
    """Follows one output through a grammar, token by token."""

    @property
    def accepting(self) -> bool:
        """Whether the output may end here."""

    def fill(self, mask: Words) -> None:
        """Set the bits of the tokens that may follow, in a mask of zeros; ends only where it is ``accepting``.

        Raises ``GrammarError`` where that has become too complex to say. Mutates the mask only.
        """

    def accept(self, token: int) -> bool:
        """Go on by a token, which is no end; False, and nothing has changed, where it cannot follow. Mutates."""

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back. Mutates."""


class CompiledGrammar(Protocol):
    """A grammar that is ready. May be shared by any number of requests."""

    def matcher(self) -> Matcher:
        """A new matcher at the beginning, which has nothing in common with others. Called where grammars are compiled,
        and may take as long."""


class GrammarCompiler(Plugin, ABC):
    """Turns grammars into masks over the vocabulary.

    Class attribute ``kinds`` says which of ``engine.core.grammar.KINDS`` it takes; others are refused for it.
    """

    kinds: ClassVar[tuple[str, ...]] = ()

    def missing(self) -> str | None:
        """What it needs and is not here, with what would help; ``None`` where all is. Asked first, and must be quick.

        The engine then starts without grammars if nobody selected this one by name, else it does not start.
        """
        return None

    @abstractmethod
    def prepare(self, vocabulary: Vocabulary) -> None:
        """Learn the vocabulary. Called once, before the first ``compile``, in a thread that may take its time."""

    @abstractmethod
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, within bounds: called in threads, several at once, that cannot be stopped.

        Raises:
            InvalidRequest: it is no grammar of its kind, or has what is not supported: refused, and never ignored.
        """
