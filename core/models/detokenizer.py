"""Token ids to streamed text: no half characters, no part of a stop string, constant work a token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from engine.core.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_PATIENCE = 8  # tokens after which text that still ends in a replacement mark is really broken, not unfinished
_LONGEST_CHARACTER = 4  # bytes, hence at most so many tokens


class StopStrings:
    """Finds stop strings in text that comes in pieces. The result does not depend on how the text is cut.

    The stop string that is complete first wins; of those complete at the same character, the longest. Each string is
    followed by its own Knuth-Morris-Pratt automaton, so a character costs constant time however long the strings are.

    Args:
        include: the string that was found is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._stops = sorted(stops, key=len, reverse=True)
        self._falls = [_fall_table(stop) for stop in self._stops]
        self._depths = [0] * len(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; return what can be shown. Mutates. Nothing comes after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text, start = self._held + text, len(self._held)
        for at in range(start, len(text)):
            for number, stop in enumerate(self._stops):
                if self._advance(number, stop, text[at]):
                    self.matched, self._held = stop, ""
                    return text[: at + 1 if self._include else at + 1 - len(stop)]
        keep = len(text) - max(self._depths)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text is over: what was held back is shown after all. Mutates."""
        text, self._held = self._held, ""
        return text

    def _advance(self, number: int, stop: str, character: str) -> bool:
        fall, depth = self._falls[number], self._depths[number]
        while depth and stop[depth] != character:
            depth = fall[depth - 1]
        depth += stop[depth] == character
        self._depths[number] = depth
        return depth == len(stop)


class TextStream:
    """The text of one request as its tokens come in. Not thread-safe.

    The pieces that ``push`` and ``finish`` return, joined, are ``tokenizer.decode`` of all the tokens, cut before the
    stop string if there is one. Only a window of the last few tokens is decoded again for each new one. (Source of the
    window: text-generation-inference and vLLM, prefix offset and read offset.)

    Args:
        tokenizer: the model's.
        stop: strings that end the text; they are not shown.
        skip_special: marks such as end-of-sequence are not shown.

    Attributes:
        stopped: the stop string that was found; ``None`` so far.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._skip_special = skip_special
        self._stops = StopStrings(stop)
        self._window: list[int] = []  # tokens whose text was shown (up to _read), then tokens whose text was not
        self._read = 0
        self._shown = 0  # characters of the window's text that were handed on

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens; return the new text that is certain. Mutates. After a stop string: always ``""``."""
        pieces = []
        for token in token_ids:
            if self.stopped is not None:
                break
            if token not in self._skipped:
                pieces.append(self._stops.feed(self._take(token)))
        return "".join(pieces)

    def finish(self) -> str:
        """No more tokens come: return what was held back; half a character shows as a replacement mark. Mutates."""
        if self.stopped is not None:
            return ""
        text = self._decode()[self._shown :]
        self._window, self._read, self._shown = [], 0, 0
        shown = self._stops.feed(text)
        return shown if self.stopped is not None else shown + self._stops.finish()

    def _take(self, token: int) -> str:
        self._window.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT):
            if len(self._window) - self._read <= _PATIENCE:
                return ""
            return self._give_way(text)
        new = text[self._shown :]
        # The tokens just read become the context of the next ones (decoders treat the first token of a text apart).
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = len(self._decode())
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special)

    def _give_way(self, text: str) -> str:
        """Broken bytes: all but the last mark is certain, and only the last few tokens can still change it."""
        new = text[self._shown : -1]
        self._window = self._window[-_LONGEST_CHARACTER:]
        self._read = 0
        self._shown = max(0, len(self._decode()) - 1)
        return new


@lru_cache(maxsize=64)  # each choice of each prompt of a request has the same ones
def _fall_table(stop: str) -> Sequence[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    depth = 0
    for at in range(1, len(stop)):
        while depth and stop[at] != stop[depth]:
            depth = table[depth - 1]
        depth += stop[at] == stop[depth]
        table[at] = depth
    return table
