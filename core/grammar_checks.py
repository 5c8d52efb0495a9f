"""What can be said against a grammar without compiling it: its kind, its length, how deep its schema is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine.core.checks import check_text, kind
from engine.core.errors import InvalidRequest
from engine.core.grammar import KINDS, Grammar

if TYPE_CHECKING:
    from engine.core.protocols import Limits
    from engine.core.sampling import SamplingParams

MAX_DEPTH = 64
MAX_CHOICES = 4096


def check_grammar(grammar: Grammar, params: SamplingParams, limits: Limits) -> None:
    """Raise ``InvalidRequest`` where it is none, breaks a limit, or contradicts other parameters."""
    if not isinstance(grammar, Grammar):
        raise InvalidRequest("grammar", f"must be a Grammar, not {kind(grammar)}")
    check_text("grammar", grammar.field)
    field = grammar.field
    if grammar.kind not in KINDS:
        raise InvalidRequest(field, f"is of an unknown kind {grammar.kind!r:.80}: one of {', '.join(KINDS)}")
    check_text(field, grammar.text)
    if "grammar" not in limits.sampling:
        raise InvalidRequest(field, "is not supported by the executor that serves here", code="unsupported")
    if grammar.kind not in limits.grammars:
        why = limits.no_grammars or f"the compiler that serves here takes {', '.join(limits.grammars)}"
        raise InvalidRequest(field, f"grammars of kind {grammar.kind} are not available: {why}", code="unsupported")
    size = len(grammar.text.encode())
    if size > limits.max_grammar_bytes:
        words = f"has {size} bytes, at most {limits.max_grammar_bytes} are allowed (max_grammar_bytes)"
        raise InvalidRequest(field, words, code="above_limit")
    if params.min_tokens:
        words = "cannot be promised beside a grammar, which ends where it is complete"
        raise InvalidRequest("min_tokens", words, code="unsupported")
    if grammar.kind == "json":
        _check_schema(field, grammar.text)
    elif grammar.kind == "choice":
        _check_choices(field, grammar.text)
    elif not grammar.text.strip():
        raise InvalidRequest(field, "is empty")


def _check_schema(field: str, text: str) -> None:
    schema = _parsed(field, text)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(field, f"a JSON schema is an object, not {kind(schema)}")
    if _deeper(schema, MAX_DEPTH):
        words = f"the schema is nested more than {MAX_DEPTH} deep"
        raise InvalidRequest(field, words, code="above_limit")


def _check_choices(field: str, text: str) -> None:
    choices = _parsed(field, text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise InvalidRequest(field, "must be a list of at least one text")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(choices)} texts, at most {MAX_CHOICES} are allowed", code="above_limit")
    if "" in choices:
        raise InvalidRequest(field, "an empty text is no choice")


def _parsed(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not valid JSON: {error}") from error


def _deeper(value: Any, depth: int) -> bool:
    """Whether a value of lists and objects is nested more than ``depth`` deep."""
    level = [value]
    for _ in range(depth):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return False
    return True


def _inner(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]
