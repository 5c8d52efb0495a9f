"""What can be said against regular expressions and grammars before xgrammar sees them: it ignores some of it."""

from __future__ import annotations

import json
import re

MACROS = {"TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "AnyTokens", "Regex", "Substring"}
NAME = r"[A-Za-z_][\w.\-]*"
REGEX_LEFT_OUT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
EBNF_LEFT_OUT = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\](?!\s*::=)|\#[^\n]*')
LARK_LEFT_OUT = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*|(?://|\#)[^\n]*')
JSON = re.compile(r"%json\b\s*")
HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]|\\u\{")


def check_regex(pattern: str, place: str = "") -> None:
    """Raise ``ValueError`` for what the library would ignore: anchors in the middle, halves of surrogate pairs."""
    where = f"{place}: " if place else ""
    if HALF_A_PAIR.search(pattern):
        raise ValueError(rf"{where}\u is supported for four digits that are a character")
    bare = REGEX_LEFT_OUT.sub(lambda found: "x" * len(found[0]), pattern)
    middle = bare[1:] if bare.startswith("^") else bare
    middle = middle[:-1] if middle.endswith("$") else middle
    if "^" in middle or "$" in middle:
        raise ValueError(f"{where}anchors are supported at both ends of a regular expression, not within")


def check_ebnf(rules: str) -> None:
    """Raise ``ValueError`` for what is more than a grammar of texts: lookahead, macros, attributes of rules."""
    bare = EBNF_LEFT_OUT.sub(" ", rules)
    defined = set(re.findall(rf"^\s*({NAME})\s*::=", bare, re.MULTILINE))
    if re.search(r"\(\s*=", bare):
        raise ValueError("lookahead '(=' is not supported")
    if re.search(r"\]\s*::=", bare):
        raise ValueError("attributes of rules are not supported")
    for name in re.findall(rf"({NAME})\s*\(", bare):
        if name in MACROS or name not in defined:
            raise ValueError(f"macro {name!r} is not supported")


def split_lark(rules: str) -> tuple[str, list[str]]:
    """A Lark grammar whose ``%json`` schemas became ``@json_0``, ``@json_1`` …, and those schemas.

    Raises ``ValueError`` for what is more than a grammar of texts: attributes, special tokens, other grammars.
    """
    out, schemas, at, bare = [], list[str](), 0, ""
    while (place := _next_json(rules, at)) is not None:
        begin, after = place
        try:
            schema, end = json.JSONDecoder().raw_decode(rules, after)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"%json: is not valid JSON: {error}") from error
        bare += LARK_LEFT_OUT.sub(" ", rules[at:begin]) + " "
        out += [rules[at:begin], f"@json_{len(schemas)} "]
        schemas.append(json.dumps(schema))
        at = end
    bare += LARK_LEFT_OUT.sub(" ", rules[at:])
    for found in LARK_LEFT_OUT.finditer(rules):
        if (text := found[0]).startswith("/") and not text.startswith("//"):
            check_regex(text[1 : text.rindex("/")])
    if "@" in bare or "<" in bare:
        raise ValueError("special tokens and names of other grammars are not supported")
    if re.search(r"\]\s*:", bare):
        raise ValueError("attributes of rules are not supported")
    return "".join([*out, rules[at:]]), schemas


def _next_json(rules: str, at: int) -> tuple[int, int] | None:
    """Where the next ``%json`` outside of texts begins, and its schema."""
    while (found := JSON.search(rules, at)) is not None:
        cover = next((one for one in LARK_LEFT_OUT.finditer(rules, at) if one.end() > found.start()), None)
        if cover is None or cover.start() > found.start():
            return found.start(), found.end()
        at = cover.end()
    return None
