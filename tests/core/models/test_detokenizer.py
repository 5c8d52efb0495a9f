"""Streams of text: joined they are the whole text, cut at the stop string, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.core.models.detokenizer import TextStream
from engine.core.models.tokenizer import Tokenizer


def stream(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = (), size: int = 1
) -> tuple[list[str], str | None]:
    text = TextStream(tokenizer, stop)
    pieces = [text.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    return [*pieces, text.finish()], text.stopped


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The rule, slowly: the first character at which some stop string is complete; the longest of those."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


TEXTS = st.text(alphabet=st.sampled_from("abc é€👋🏽你\n\ufffd"), max_size=30)
STOPS = st.lists(st.text(alphabet="abc é€", min_size=1, max_size=4), max_size=3).map(tuple)
SIZES = st.integers(1, 4)


@given(text=TEXTS, stops=STOPS, size=SIZES)
def test_joined_pieces_are_the_text_up_to_the_stop(
    bytewise: Tokenizer, text: str, stops: tuple[str, ...], size: int
) -> None:
    pieces, stopped = stream(bytewise, bytewise.encode(text), stops, size)
    assert ("".join(pieces), stopped) == cut(text, stops)


@given(ids=st.lists(st.integers(0, 261), max_size=60), size=SIZES)
def test_joined_pieces_are_the_decoded_tokens_even_where_bytes_are_broken(
    bytewise: Tokenizer, ids: list[int], size: int
) -> None:
    pieces, _ = stream(bytewise, ids, size=size)
    assert "".join(pieces) == bytewise.decode(ids)


@given(ids=st.lists(st.sampled_from([0x80, 0xC3, 0xE2, 0x82, 0xF0, 0x9F, 0x61, 258, 260]), max_size=80))
def test_long_runs_of_broken_bytes(bytewise: Tokenizer, ids: list[int]) -> None:
    pieces, _ = stream(bytewise, ids)
    assert "".join(pieces) == bytewise.decode(ids)


@given(text=TEXTS, stops=STOPS)
def test_nothing_shown_is_ever_taken_back(bytewise: Tokenizer, text: str, stops: tuple[str, ...]) -> None:
    """At any moment what was shown is a beginning of the final text, and no half character."""
    final, _ = cut(text, stops)
    shown = ""
    out = TextStream(bytewise, stops)
    for token in bytewise.encode(text):
        shown += out.push([token])
        assert final.startswith(shown)


def test_a_character_of_several_tokens_comes_whole(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("a👋b")
    assert len(ids) == 5  # one merge inside the emoji
    assert stream(bytewise, ids)[0] == ["a", "", "", "👋", "b", ""]


def test_an_unfinished_character_shows_as_one_mark_at_the_end(bytewise: Tokenizer) -> None:
    assert stream(bytewise, [0x61, 0xF0, 0x9F, 0x91])[0] == ["a", "", "", "", "\ufffd"]


def test_stop_strings_across_tokens(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("one STOP two")
    pieces, stopped = stream(bytewise, ids, ("STOP",))
    assert ("".join(pieces), stopped) == ("one ", "STOP")
    assert pieces[4:] == [""] * (len(pieces) - 4)


def test_a_false_start_is_held_back_then_shown(bytewise: Tokenizer) -> None:
    assert stream(bytewise, bytewise.encode("xSTxSTO"), ("STOP",))[0] == ["x", "", "", "STx", "", "", "", "STO"]


def test_a_stop_string_inside_its_own_false_start(bytewise: Tokenizer) -> None:
    pieces, stopped = stream(bytewise, bytewise.encode("xaab"), ("ab",))
    assert ("".join(pieces), stopped) == ("xa", "ab")


def test_a_stop_string_at_the_very_end_and_at_the_very_beginning(bytewise: Tokenizer) -> None:
    assert cut("hi.\n\n", ("\n\n",)) == ("hi.", "\n\n")
    for text in ("hi.\n\n", "\n\nhi"):
        pieces, stopped = stream(bytewise, bytewise.encode(text), ("\n\n",))
        assert ("".join(pieces), stopped) == (text.strip() if text[0] == "h" else "", "\n\n")


def test_tokens_after_the_stop_are_ignored(bytewise: Tokenizer) -> None:
    out = TextStream(bytewise, ("b",))
    assert out.push(bytewise.encode("a b c b")) == "a "
    assert (out.push(bytewise.encode("more")), out.finish(), out.stopped) == ("", "", "b")


def test_special_tokens_are_not_shown_and_do_not_split_characters(bytewise: Tokenizer) -> None:
    (mark,) = bytewise.encode("<s>")
    euro = list("€".encode())
    assert "".join(stream(bytewise, [mark, euro[0], mark, *euro[1:], mark])[0]) == "€"


def test_work_per_token_does_not_grow_with_the_text(bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    original = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return original(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    broken = [0x80] * 500 + [0xF0] * 500 + list(b"plain text") * 50
    stream(bytewise, broken)
    assert max(decoded) <= 16
    assert sum(decoded) < 24 * len(broken)


@given(text=st.text(alphabet=st.sampled_from("ab €你"), max_size=20))
def test_decoders_that_treat_the_first_token_apart(text: str) -> None:
    """SentencePiece style: spaces are ``▁``, the text's first space is dropped, unknown characters are byte tokens."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "▁b"]
    backend = Backend(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend)
    ids: list[int] = []
    for letter in " " + text:
        letter = letter.replace(" ", "▁")
        ids += [tokens.index(letter)] if letter in tokens else list(letter.encode())
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)[0]) == text
