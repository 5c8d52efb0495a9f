"""The code of a new grammar compiler. ``@WORD@`` is filled in."""

from __future__ import annotations

GRAMMAR = '''
"""@NAME@: a compiler of grammars. It says which tokens may follow; the engine parks, masks, and goes back."""

import numpy as np
from pydantic import Field

from engine.core import GrammarCompiler, InvalidRequest, PluginOptions


class @CLASS@(GrammarCompiler):
    """One of several texts, byte by byte."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"
    kinds = ("choice",)

    class Options(PluginOptions):
        most: int = Field(1000, ge=1, description="most texts to choose from")

    def prepare(self, vocabulary):
        """Remember which tokens say what: several may say the same."""
        self.vocabulary, self.ids = vocabulary, {}
        for token, data in enumerate(vocabulary.tokens):
            if data and token not in vocabulary.special_ids:
                self.ids.setdefault(data, []).append(token)
        self.longest = max(map(len, self.ids), default=0)

    def compile(self, grammar):
        """Called in a thread: it may take its time, within bounds."""
        texts = [text.encode() for text in grammar.choices]
        if len(texts) > self.options.most:
            raise InvalidRequest(grammar.field, f"has {len(texts)} texts, at most {self.options.most} are allowed")
        return Choice(self, texts)


class Choice:
    """A compiled grammar: any number of requests may follow it."""

    def __init__(self, compiler, texts):
        self.compiler, self.texts = compiler, texts

    def matcher(self):
        """A new one, at the beginning."""
        return Follower(self.compiler, self.texts)


class Follower:
    """Follows one output."""

    def __init__(self, compiler, texts):
        self.compiler, self.texts = compiler, texts
        self.said = [b""]  # after each token

    @property
    def rests(self):
        """What may still be said."""
        said = self.said[-1]
        return [text[len(said) :] for text in self.texts if text.startswith(said)]

    @property
    def accepting(self):
        """Whether one of the texts is complete."""
        return b"" in self.rests

    def fill(self, mask):
        """Set the bits of the tokens that begin what may still be said."""
        tokens = set(self.compiler.vocabulary.eos_ids) if self.accepting else set()
        for rest in self.rests:
            for end in range(1, min(len(rest), self.compiler.longest) + 1):
                tokens.update(self.compiler.ids.get(rest[:end], ()))
        for token in tokens:
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token):
        """Go on by a token, if it may follow."""
        vocabulary = self.compiler.vocabulary
        data = vocabulary.tokens[token] if token < len(vocabulary.tokens) else b""
        if not data or token in vocabulary.special_ids or not any(rest.startswith(data) for rest in self.rests):
            return False
        self.said.append(self.said[-1] + data)
        return True

    def rollback(self, count):
        """Take tokens back."""
        del self.said[len(self.said) - count :]
'''
