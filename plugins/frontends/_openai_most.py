"""How much each field of a body may hold: what follows from the engine's limits, so that what is beyond them is refused
before anything is built of it. ``_openai_bounds`` says the same in ``/openapi.json``, where JSON Schema can."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.checks import MAX_METADATA
from engine.core.protocols import Limits
from engine.plugins.frontends._bounds import Most

MOST_METADATA = MAX_METADATA // 2  # fields: each counts itself and a name, of one character at least
ESCAPED = 12  # bytes of a character at most: two \uXXXX
GRAMMARS = 8  # times the longest grammar, each byte of which may be written as \uXXXX; and what stands around it
AROUND = 64  # elements around a schema
FACTOR = 4  # up to so many times the limit, whoever knows what it is about says better what is wrong


def most_of(limits: Limits) -> Mapping[str, Most]:
    """By the field's name; ``FEW`` for those that are not here. A conversation and what functions take may hold what a
    whole body may."""
    grammar = Most(
        elements=limits.max_grammar_bytes + AROUND, text=GRAMMARS * limits.max_grammar_bytes + ESCAPED * AROUND,
        option="max_grammar_bytes",
    )  # fmt: skip
    tokens = max(limits.max_model_len, limits.max_waiting_tokens)
    return {
        "prompt": Most(FACTOR * limits.max_open, FACTOR * limits.max_open, tokens),
        "stop": Most(elements=limits.max_stop_strings, option="max_stop_strings"),
        "stop_token_ids": Most(elements=limits.max_stop_token_ids, option="max_stop_token_ids"),
        "logit_bias": Most(elements=limits.max_logit_bias, option="max_logit_bias"),
        "metadata": Most(elements=MOST_METADATA, text=ESCAPED * MAX_METADATA),
        **dict.fromkeys(("response_format", "structured_outputs", "text"), grammar),
        **dict.fromkeys(("messages", "input", "tools", "tokens"), Most()),
    }


def of_inputs(most: Mapping[str, Most]) -> Mapping[str, Most]:
    """The same where ``input`` is no conversation but what ``prompt`` is elsewhere."""
    return {**most, "input": most["prompt"]}
