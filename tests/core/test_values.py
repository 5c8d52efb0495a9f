"""Text to typed values, and types in words."""

from __future__ import annotations

import enum
import tomllib
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError

from engine.core import PluginOptions
from engine.core.values import as_toml, bounds_of, from_text, is_secret, kind_of, readable


class Colour(enum.Enum):
    RED = "r"
    BLUE = 2


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("none", int | None, None),
        ("NULL", float | None, None),
        ("none", str | None, None),
        ("none", str, "none"),
        ("none", int, "none"),  # whoever validates it says that it is no number
        ("12", int, "12"),
        ("a, b,", list[str], ["a", "b"]),
        ('["a,b"]', tuple[str, ...], ["a,b"]),
        ("", list[int], []),
        ("1,none", list[int | None], ["1", None]),
        ("a=1,b = 2", dict[str, float], {"a": "1", "b": "2"}),
        ('{"a": 1}', dict[str, float], {"a": 1}),
        ("2", Literal[1, 2], 2),
        ("true", Literal[True, "auto"], True),
        ("auto", Literal[True, "auto"], "auto"),
        ("RED", Colour, Colour.RED),
        ("2", Colour, Colour.BLUE),
        ("none", Annotated[int | None, Field(ge=1)], None),
        ("a,b", Any, "a,b"),
        ("none", SecretStr, "none"),
        ("[1", int | list[int] | str, "[1"),
    ],
)
def test_text_becomes_what_the_type_says(text, kind, value):
    assert from_text(text, kind) == value


@pytest.mark.parametrize(("text", "kind"), [("[1", list[int]), ("a=1,b", dict[str, int]), ("{", dict[str, int])])
def test_text_that_means_nothing(text, kind):
    with pytest.raises(ValueError, match="not valid JSON|has no value"):
        from_text(text, kind)


class Everything(PluginOptions):
    flag: bool = Field(False, description="a truth")
    count: int | None = Field(3, ge=1, lt=9, description="a number")
    names: list[str] = Field(["x"], description="some")
    weights: dict[str, float] = Field({}, description="shares")
    level: Literal[1, 2] = Field(1, description="a choice")
    colour: Colour = Field(Colour.RED, description="another")
    label: str | None = Field("plain", description="text")
    password: SecretStr | None = Field(None, description="hidden")


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "True"])
def test_options_take_text(text):
    options = Everything(flag=text, count="none", names="a,b", weights="a=2", level="2", colour="BLUE", label="none")
    assert options == Everything(
        flag=True, count=None, names=["a", "b"], weights={"a": 2.0}, level=2, colour=Colour.BLUE, label=None
    )


def test_bad_text_names_the_option():
    for given in ({"weights": "a"}, {"count": "9"}, {"level": "3"}, {"flag": "maybe"}):
        with pytest.raises(ValidationError) as caught:
            Everything(**given)
        assert caught.value.errors()[0]["loc"] == tuple(given)


def test_types_in_words():
    fields = Everything.model_fields
    assert {name: kind_of(field.annotation) for name, field in fields.items()} == {
        "flag": "true or false", "count": "int or none", "names": "list of str", "weights": "name=float,…",
        "level": "one of 1, 2", "colour": "one of r, 2", "label": "str or none", "password": "secret or none",
    }  # fmt: skip
    assert bounds_of(fields["count"]) == "at least 1, below 9"
    assert bounds_of(fields["label"]) == ""
    assert [name for name, field in fields.items() if is_secret(name, field)] == ["password"]


@pytest.mark.parametrize(
    "value",
    [
        True,
        0,
        -3,
        1.5,
        1e300,
        float("inf"),
        "",
        'a "quote"\n\\ \x7f é 😀',
        [1, "a", [True]],
        {"a.b": 1, "c": ["x"]},
        [],
    ],
)
def test_toml_is_read_back(value):
    assert tomllib.loads(f"x = {as_toml(value)}")["x"] == value


def test_readable():
    assert readable({"a": 1.0, "b": None}) == "a=1.0,b=none"
    assert readable([True, "x"]) == "true,x"
    assert readable([]) == "[]"
