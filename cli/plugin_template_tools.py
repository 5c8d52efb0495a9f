"""The code of a new parser of tool calls. ``@WORD@`` is filled in."""

from __future__ import annotations

TOOLS = '''
"""@NAME@: a parser of tool calls. An answer of JSON objects is calls; all else is content."""

import json

from pydantic import Field

from engine.core import CallPiece, Grammar, Heard, PluginOptions, ToolParser


class @CLASS@(ToolParser):
    """Calls are {"name": …, "parameters": …}, as Llama 3.1 writes them."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        preface: str = Field("You may answer with a JSON object that calls a function.", description="instructions")

    def stream(self):
        """A reader for one answer."""
        return Reader()

    def grammar(self, tools, *, parallel, field):
        """A call of one of the tools."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "parameters": dict(tool.schema)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return Grammar.json({"anyOf": calls}, field=field)

    def instructions(self, tools):
        """For chat templates that know no tools."""
        return "\\n".join([self.options.preface, *(json.dumps(tool.plain()["function"]) for tool in tools)])

    def written(self, calls):
        """Calls as the model writes them."""
        return "\\n".join(f'{{"name": {json.dumps(call.name)}, "parameters": {call.arguments}}}' for call in calls)

    def answered(self, content):
        """What the function gave back."""
        return content


class Reader:
    """Passes text on, unless it begins like a call: then it waits for the end."""

    def __init__(self):
        self.text, self.plain = "", False

    def push(self, text):
        """More of the answer."""
        self.text += text
        if not self.plain:
            begun = self.text.lstrip()
            self.plain = bool(begun) and not begun.startswith("{")
        return self._heard() if self.plain else Heard()

    def finish(self):
        """The answer is over."""
        try:
            calls = self._objects()
            values = [json.dumps(call["parameters"], allow_nan=False) for call in calls]
            pieces = [CallPiece(n, call["name"], values[n]) for n, call in enumerate(calls)]
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._heard()
        if not all(isinstance(piece.name, str) and piece.name.isprintable() for piece in pieces):
            return self._heard()
        return Heard(calls=tuple(pieces))

    def _objects(self):
        """JSON objects, one after the other."""
        text, found = self.text.strip(), []
        while text:
            value, end = json.JSONDecoder().raw_decode(text)
            found.append(value)
            text = text[end:].lstrip()
        return found

    def _heard(self):
        text, self.text = self.text, ""
        return Heard(text)
'''
