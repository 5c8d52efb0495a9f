"""The code of a new parser of tool calls. ``@WORD@`` is filled in."""

from __future__ import annotations

TOOLS = '''
"""@NAME@: a parser of tool calls. An answer that is one JSON object with a name is a call; all else is content."""

import json

from pydantic import Field

from engine.core import CallPiece, Grammar, Heard, PluginOptions, ToolParser


class @CLASS@(ToolParser):
    """The whole answer is {"name": …, "parameters": …}, as Llama 3.1 writes a call."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        preface: str = Field("You may answer with a JSON object that calls a function.", description="instructions")

    def stream(self):
        """A reader for one answer."""
        return Reader()

    def grammar(self, tools, *, parallel, field):
        """One of the tools; there is only one call in an answer."""
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
        """A call as the model writes it."""
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
            call = json.loads(self.text)
            name, arguments = call["name"], json.dumps(call["parameters"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._heard()
        if not isinstance(name, str):
            return self._heard()
        return Heard(calls=(CallPiece(0, name, arguments),))

    def _heard(self):
        text, self.text = self.text, ""
        return Heard(text)
'''
