"""What an answer must be: OpenAI's ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.grammar import Grammar
from engine.plugins.frontends._bounds import Off
from engine.plugins.frontends._openai_fields import UNSUPPORTED, Strict
from engine.plugins.frontends._piecemeal import MISSING

FORMAT, OUTPUTS = "response_format", "structured_outputs"


class JSONSchema(Strict):
    """A named schema. It is always kept to, ``strict`` or not."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema", description="a JSON schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """``text``, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    def grammar(self) -> Grammar | None:
        """What the answer must be; ``None`` for text. Raises ``InvalidRequest``."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            words = "is required" if self.json_schema is None else f"does not go with type {self.type!r}"
            code = MISSING if self.json_schema is None else "invalid_value"
            raise InvalidRequest(f"{FORMAT}.json_schema", words, code=code)
        if self.type == "text":
            return None
        return Grammar.json(None if self.json_schema is None else self.json_schema.schema_, field=FORMAT)


class StructuredOutputs(Strict):
    """vLLM's names. One of them."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = None
    choice: list[str] | None = Field(None, description="one of these texts")
    grammar: str | None = Field(
        None, description="a context-free grammar: EBNF where rules are defined by ::=, else Lark's"
    )
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: Any = Field(None, description="not supported", json_schema_extra={"type": "null"})
    whitespace_pattern: Any = Field(None, description="not supported", json_schema_extra={"type": "null"})
    disable_any_whitespace: Off | None = None
    disable_additional_properties: Off | None = None

    def chosen(self) -> Grammar:
        """What the answer must be. Raises ``InvalidRequest``."""
        for name in ("structural_tag", "whitespace_pattern"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{OUTPUTS}.{name}", "is not supported", code=UNSUPPORTED)
        makers: dict[str, Any] = {"json": Grammar.json, "regex": Grammar.regex, "choice": Grammar.choice,
                                  "grammar": Grammar.rules}  # fmt: skip
        given = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = [makers[name](value, field=f"{OUTPUTS}.{name}") for name, value in given.items() if value is not None]
        if self.json_object:
            found.append(Grammar.json(field=f"{OUTPUTS}.json_object"))
        if len(found) != 1:
            words = f"give one of {', '.join(given)}, json_object; {len(found)} were given"
            raise InvalidRequest(OUTPUTS, words)
        return found[0]  # type: ignore[no-any-return]


def grammar_of(wanted: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """What a request's answer must be. Raises ``InvalidRequest`` where both say something."""
    grammar = None if wanted is None else wanted.grammar()
    if outputs is None:
        return grammar
    if grammar is not None:
        raise InvalidRequest(OUTPUTS, f"{FORMAT} asks for something, too: give one of them")
    return outputs.chosen()
