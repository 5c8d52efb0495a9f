"""API keys: several, with labels, from a file that may change; told apart in constant time, never shown."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ConfigError
from engine.core.keys import Keys


def test_a_file_has_labels_or_not(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may ask\n\nteam-a: sesame\nteam-b:open:up\nplain\nhas:notalabel\n")
    keys = Keys(["flag"], file)
    assert [keys.holder(key) for key in ("sesame", "open:up", "plain", "flag", "notalabel")] == [
        "team-a", "team-b", "", "", "has",
    ]  # fmt: skip
    assert [keys.holder(key) for key in ("", "Sesame", "sesam", "sesame ", "team-a", "open", "clé", "\udcff")] == [
        None
    ] * 8
    assert (len(keys), keys.labels) == (5, ["team-a", "team-b", "has"])
    assert (keys.from_file, Keys(["flag"]).from_file) == (True, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "there is no key"), ("# nobody\n", "there is no key"), ("a: \n", "line 1: a key is printable"),
     ("ok\ntwo words\n", "line 2: a key is printable"), ("a: secret\nb: secret\n", "line 2: this key is given twice")],
)  # fmt: skip
def test_files_that_protect_nothing_are_refused_and_not_quoted(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        Keys(file=file)
    assert not {"secret", "words"} & set(str(caught.value).replace("'", " ").split())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys(file=tmp_path / "none")


def test_every_key_is_compared_whatever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, compared = Keys([f"key{n}" for n in range(10)]), []
    compare = hmac.compare_digest

    def counting(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for given in ("key0", "key9", "none of them", "", "x" * 10_000):
        compared.clear()
        keys.holder(given)
        assert compared == [(32, 32)] * 10  # all, and at one length


def test_a_bad_reload_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a: one\n")
    keys = Keys(file=file)
    file.write_text("b: two\n")
    keys.reload()
    assert (keys.holder("one"), keys.holder("two")) == (None, "b")
    file.write_text("two words\n")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.holder("two") == "b"


def test_nothing_shows_a_key(tmp_path: Path) -> None:
    keys = Keys(["sesame"])
    assert "sesame" not in repr(keys) + str(vars(keys).get("_known"))
