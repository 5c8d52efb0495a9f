"""Grammar compilers that are broken on purpose, each in one way: what `engine plugins new` writes, less something."""

from __future__ import annotations

import numpy as np

from engine.cli.plugin_new import fill
from engine.cli.plugin_templates import CODE

exec(compile(fill(CODE["grammar"], {"NAME": "plain", "CLASS": "Plain"}), "template", "exec"), globals())
Plain, Choice, Follower = globals()["Plain"], globals()["Choice"], globals()["Follower"]


def mutant(name, follower, words):
    """A compiler whose matchers are of another kind."""

    class Chosen(Choice):
        def matcher(self):
            return follower(self.compiler, self.texts)

    class Broken(Plain):
        def compile(self, grammar):
            plain = super().compile(grammar)
            return Chosen(plain.compiler, plain.texts)

    Broken.__name__, Broken.__doc__, Broken.__module__ = name, words, __name__
    return Broken


class _AllowsAnything(Follower):
    def fill(self, mask):
        mask.fill(-1)


class _EndsAnywhere(Follower):
    def fill(self, mask):
        super().fill(mask)
        mask[0] |= 1


class _NeverEnds(Follower):
    def fill(self, mask):
        super().fill(mask)
        mask[0] &= ~1


class _AllowsMarks(Follower):
    def fill(self, mask):
        super().fill(mask)
        mask[0] |= 2


class _WholePiecesOnly(Follower):
    """Knows one way to write a text."""

    def fill(self, mask):
        for rest in self.rests if not self.said[-1] else ():
            for token in self.compiler.ids.get(rest, ()):
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        if self.said[-1] or not mask.any():
            super().fill(mask)


class _GoesBackOne(Follower):
    def rollback(self, count):
        super().rollback(1)


class _ForgetsTheEnd(Follower):
    """Going back from what was complete is where many go wrong."""

    over = False

    def accept(self, token):
        accepted = super().accept(token)
        self.over = self.over or self.accepting
        return accepted

    def fill(self, mask):
        if self.over:
            mask[0] |= 1
        else:
            super().fill(mask)


class _TakesAnything(Follower):
    def accept(self, token):
        self.said.append(self.said[-1] + self.compiler.vocabulary.tokens[token])
        return True


AllowsAnything = mutant("AllowsAnything", _AllowsAnything, "What is a mask for?")
EndsAnywhere = mutant("EndsAnywhere", _EndsAnywhere, "Enough is enough.")
NeverEnds = mutant("NeverEnds", _NeverEnds, "There is always more to say.")
AllowsMarks = mutant("AllowsMarks", _AllowsMarks, "A mark is a token, too.")
WholePiecesOnly = mutant("WholePiecesOnly", _WholePiecesOnly, "A text is written in one way.")
GoesBackOne = mutant("GoesBackOne", _GoesBackOne, "One step back is enough.")
ForgetsTheEnd = mutant("ForgetsTheEnd", _ForgetsTheEnd, "What is complete stays complete.")
TakesAnything = mutant("TakesAnything", _TakesAnything, "Whoever chose it will have known why.")


class SharesOne(Plain):
    """One matcher will do for all."""

    def compile(self, grammar):
        """The same, whoever asks."""
        one = super().compile(grammar).matcher()
        return type("Same", (), {"matcher": lambda self: one})()


class ComesUndone(Plain):
    """Remembers what it compiled last."""

    def compile(self, grammar):
        """In one place for all threads."""
        import time

        self.last = super().compile(grammar)
        time.sleep(0.002)
        return self.last


class TakesAllKinds(Plain):
    """JSON is text, after all."""

    kinds = ("choice", "json")

    def compile(self, grammar):
        """Whatever it is."""
        if grammar.kind == "choice":
            return super().compile(grammar)
        return Choice(self, [b"{}"])


class BlamesAnother(Plain):
    """Raises what is wrong, at the wrong place."""

    kinds = ("choice", "regex")

    def compile(self, grammar):
        """A field of its own."""
        if grammar.kind == "choice":
            return super().compile(grammar)
        from engine.core import InvalidRequest

        raise InvalidRequest("regex", "not here")


class TakesNothing(Plain):
    """Too good for any kind."""

    kinds = ()
