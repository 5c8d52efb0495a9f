"""Parsers of tool calls: how a model writes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from engine.core.grammar import Grammar
from engine.core.protocols.plugin import Plugin
from engine.core.tools import Heard, Tool, ToolCall


class ToolStream(Protocol):
    """Reads one answer for the calls in it. What it says of the whole does not depend on how the text was cut."""

    def push(self, text: str) -> Heard:
        """More of the answer; returns what is certain now. Mutates."""

    def finish(self) -> Heard:
        """The answer is over; returns what was held back. Mutates."""


class ToolParser(Plugin, ABC):
    """How a model writes calls of tools. Used by frontends, in their process.

    Class attribute ``marks``: texts that stand around calls; where the model has them as special tokens, they are not
    left out of the text.
    """

    marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def stream(self) -> ToolStream:
        """A reader for one answer."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], *, parallel: bool, field: str) -> Grammar:
        """What an answer is that calls some of these tools and says nothing else: for clients that require it.

        Raises ``InvalidRequest`` where a tool cannot be written so.

        Args:
            parallel: several calls, or one.
            field: of the request, for the grammar's own errors.
        """

    @abstractmethod
    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system's message says of the tools, for models whose chat template knows nothing of them."""

    @abstractmethod
    def written(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the model writes them, for the same."""

    @abstractmethod
    def answered(self, content: str) -> str:
        """What a tool gave back, as the model is told of it, for the same."""
