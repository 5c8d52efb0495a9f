"""JSON schemas for xgrammar, which ignores what it does not know: that is refused here. What it would read otherwise
than the standard does is written in its words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from engine.plugins.grammars._xgrammar_texts import check_regex

Schema: TypeAlias = dict[str, Any] | bool

SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
SAYS_NOTHING |= {"$schema", "x-guidance"}
DEFINITIONS = ("$defs", "definitions")
STRING = {"minLength", "maxLength", "pattern", "format"}
NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
ARRAY = {"items", "prefixItems", "minItems", "maxItems"}
OBJECT = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
FAMILIES = {"string": STRING, "number": NUMBER, "integer": NUMBER, "array": ARRAY, "object": OBJECT}
TYPES = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
MOST_COMPARISONS = 50_000  # of schemas and values with each other, to tell branches of ``oneOf`` apart
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
FORMATS = {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"}
FORMATS |= {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
# A string's pattern is written into the JSON as it is: what has to be escaped there must not be named in it.
ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfvcx0]|\\u(00[01]|0022|005[cC]|[dD][89a-fA-F]|\{)')


class Refused(ValueError):
    """What is not supported, with the place in the schema."""


def rewritten(text: str) -> str:
    """A schema that says the same, or a little less, in what the library keeps to.

    Raises ``Refused``, a ``ValueError``.
    """
    root = json.loads(text)
    rewriter = _Rewriter(root)
    out = rewriter.schema(
        {key: value for key, value in root.items() if key != "$id"} if isinstance(root, dict) else root
    )
    rewriter.check_references()
    if rewriter.named:
        assert isinstance(out, dict)
        out["$defs"] = {**out.get("$defs", {}), **rewriter.named}
    return json.dumps(out)


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._places = set[str]()
        self._references = list[tuple[str, str]]()
        self._comparisons = MOST_COMPARISONS
        self.named: dict[str, Schema] = {}  # schemas that are needed at several places

    def check_references(self) -> None:
        for at, reference in self._references:
            if unquote(reference) not in self._places:
                raise Refused(f"{at}: '$ref' {reference!r:.80}: there is no schema")

    def schema(self, node: Any, at: str = "#") -> Schema:
        self._places.add(at)
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise Refused(f"{at}: a schema is an object, or true or false")
        said = {key: value for key, value in node.items() if key not in SAYS_NOTHING and key not in DEFINITIONS}
        out: dict[str, Any] = {}
        for key in DEFINITIONS:
            if key in node:
                out[key] = self._named(node[key], f"{at}/{key}")
        alone = [key for key in ALONE if key in said]
        if alone:
            return {**out, **self._alone(alone[0], said, at)}
        if said:
            out.update(self._typed(said, at))
        return out

    def _named(self, value: Any, at: str) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise Refused(f"{at}: must be an object")
        return {name: self.schema(one, f"{at}/{_escaped(name)}") for name, one in value.items()}

    def _name(self, schema: Schema) -> Schema:
        """A reference to a schema, which has a name from now on. Mutates."""
        name = f"additional properties, number {len(self.named)}"
        while f"#/$defs/{name}" in self._places:
            name += "'"
        self.named[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    # ---- what stands alone: the library looks at nothing beside it

    def _alone(self, key: str, said: dict[str, Any], at: str) -> dict[str, Any]:
        others = sorted(set(said) - {key, "type"} if key in ("enum", "const") else set(said) - {key})
        if others:
            raise Refused(f"{at}: {key!r} beside {others[0]!r} is not supported")
        value = said[key]
        if key == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise Refused(f"{at}: '$ref' {value!r:.80} is not supported: references begin with '#/'")
            self._references.append((at, value))
            return {key: value}
        if key in ("enum", "const"):
            values = value if key == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise Refused(f"{at}: 'enum' must be a list of at least one value")
            types = _types(said, at)
            wrong = next((one for one in values if types and not any(_is(one, kind) for kind in types)), None)
            if wrong is not None or (types and None in values and "null" not in types):
                raise Refused(f"{at}: {json.dumps(wrong)[:80]} is not of type {said['type']!r}")
            return {key: value}
        if not isinstance(value, list) or not value:
            raise Refused(f"{at}: {key!r} must be a list of at least one schema")
        if key == "allOf" and len(value) > 1:
            raise Refused(f"{at}: 'allOf' of several schemas is not supported")
        branches = [self.schema(one, f"{at}/{key}/{n}") for n, one in enumerate(value)]
        if key == "oneOf" and not self._apart(value):
            raise Refused(f"{at}: 'oneOf' is supported where it can be seen that no value fits two of them; else anyOf")
        return {"anyOf" if key == "oneOf" else key: branches}

    def _apart(self, nodes: list[Any]) -> bool:
        """Whether no value fits two of the schemas, as far as can be seen."""
        return all(self._differ(one, other, 0) for n, one in enumerate(nodes) for other in nodes[:n])

    def _differ(self, one: Any, other: Any, depth: int) -> bool:
        one, other = self._behind(one), self._behind(other)
        self._comparisons -= 1
        if depth > 4 or self._comparisons < 0 or not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        values = [_values(node) for node in (one, other)]
        if values[0] is not None and values[1] is not None:
            self._comparisons -= len(values[0]) * len(values[1])
            if self._comparisons < 0:
                return False
            return not any(_same(a, b) for a in values[0] for b in values[1])
        kinds = [_kinds(node, found) for node, found in zip((one, other), values, strict=True)]
        if kinds[0] and kinds[1] and not any(_overlap(a, b) for a in kinds[0] for b in kinds[1]):
            return True
        if kinds[0] == kinds[1] == {"object"}:
            shared = set(_names(one.get("required"))) & set(_names(other.get("required")))
            mine, theirs = one.get("properties"), other.get("properties")
            if isinstance(mine, dict) and isinstance(theirs, dict):
                both = [name for name in shared if name in mine and name in theirs]
                return any(self._differ(mine[name], theirs[name], depth + 1) for name in both)
        return False

    def _behind(self, node: Any) -> Any:
        for _ in range(8):
            if not isinstance(node, dict) or "$ref" not in node:
                break
            node = _found(self._root, node["$ref"])
        return node

    # ---- what a type has

    def _typed(self, said: dict[str, Any], at: str) -> dict[str, Any]:
        types = _types(said, at)
        if not types:
            types = ["object"] if "properties" in said else ["array"] if {"items", "prefixItems"} & set(said) else []
        known = {"type"}.union(*(FAMILIES.get(kind, set()) for kind in types))
        for key in said:
            if key not in known:
                family = next((kind for kind, keys in FAMILIES.items() if key in keys), None)
                words = "is not supported" if family is None else f"needs 'type': {family!r} beside it"
                raise Refused(f"{at}: {key!r} {words}")
            if key in COUNTS and (type(said[key]) is not int or not 0 <= said[key] < 1 << 31):
                raise Refused(f"{at}: {key!r} must be a whole number from 0 to 2147483647")
        out = {**said, "type": types if len(types) != 1 else types[0]}
        makers: dict[str, Callable[[dict[str, Any], str], None]] = {
            "string": self._string, "array": self._array, "object": self._object,
        }  # fmt: skip
        for kind in types:
            if kind in makers:
                makers[kind](out, at)
        return out

    def _string(self, out: dict[str, Any], at: str) -> None:
        given: list[str] = [name for name in ("pattern", "format") if name in out]
        given += ["minLength or maxLength"] if {"minLength", "maxLength"} & set(out) else []
        if len(given) > 1:
            raise Refused(f"{at}: {given[0]!r} beside {given[1]} is not supported")
        if "format" in out and not (isinstance(out["format"], str) and out["format"] in FORMATS):
            raise Refused(f"{at}: format {out['format']!r:.80} is not supported")
        if "pattern" in out:
            pattern = out["pattern"]
            if not isinstance(pattern, str):
                raise Refused(f"{at}: 'pattern' must be a text")
            check_regex(pattern, f"{at}/pattern")
            if ESCAPED.search(pattern):
                raise Refused(
                    f"{at}: a pattern that names what JSON escapes (quotes, backslashes, controls) is not supported"
                )

    def _array(self, out: dict[str, Any], at: str) -> None:
        if "items" in out:
            out["items"] = self.schema(out["items"], f"{at}/items")
        if "prefixItems" in out:
            if not isinstance(out["prefixItems"], list):
                raise Refused(f"{at}: 'prefixItems' must be a list")
            out["prefixItems"] = [self.schema(one, f"{at}/prefixItems/{n}") for n, one in enumerate(out["prefixItems"])]

    def _object(self, out: dict[str, Any], at: str) -> None:
        out["properties"] = properties = self._named(out.get("properties", {}), f"{at}/properties")
        more = out.get("additionalProperties", True)
        out["additionalProperties"] = self.schema(more, f"{at}/additionalProperties")
        required = out.get("required", [])
        if not isinstance(required, list) or _names(required) != required:
            raise Refused(f"{at}: 'required' must be a list of names")
        missing = [name for name in required if name not in properties]
        if missing and more is False:
            raise Refused(f"{at}: {missing[0]!r:.80} is required, and not allowed")
        if missing and isinstance(out["additionalProperties"], dict):
            out["additionalProperties"] = self._name(out["additionalProperties"])
        for name in missing:  # the library forgets names that it knows no schema of
            properties[name] = out["additionalProperties"]
        if not properties:
            del out["properties"]


def _types(said: Mapping[str, Any], at: str) -> list[str]:
    given = said.get("type")
    if given is None and "type" not in said:
        return []
    types: list[Any] = given if isinstance(given, list) else [given]
    known = {*TYPES, "number", "integer"}
    if not types or not all(isinstance(kind, str) and kind in known for kind in types):
        raise Refused(f"{at}: type {given!r:.80} is none of {', '.join(sorted(known))}")
    return types


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, TYPES[kind])


def _values(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and (isinstance(one, bool) == isinstance(other, bool))


def _kinds(node: Mapping[str, Any], values: list[Any] | None) -> set[str]:
    """The types that a value of the schema may have; empty: nobody knows."""
    if values is not None:
        return {next((kind for kind in (*TYPES, "number") if _is(value, kind)), "number") for value in values}
    given = node.get("type", "object" if "properties" in node else ())
    return {given} if isinstance(given, str) else {kind for kind in given if isinstance(kind, str)}


def _overlap(one: str, other: str) -> bool:
    return one == other or {one, other} == {"integer", "number"}


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _found(root: Schema, reference: Any) -> Any:
    """What a local reference means; ``None`` where there is nothing."""
    node: Any = root
    for part in unquote(str(reference)).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, dict) else None
    return node
