"""A request's text as its tokens come in: stop strings over tokens, characters over tokens, marks (cases B31, B32)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.core.plan import Delta
from engine.core.request import Finish, SamplingParams
from engine.core.sampling import TokenLogprobs
from engine.core.serve.streams import Gather, Stream
from engine.core.serve.text import text_of

EOS = 2  # of the default model


def stream(tokenizer: Any, tokens: Sequence[int], params: SamplingParams, cuts: int = 1, last: Any = None) -> Any:
    """What comes of these tokens, ``cuts`` in a step, read after every step; and the pieces of text."""
    one = Stream("r", 1, params, text_of(tokenizer, params))
    gather, pieces = Gather(), []
    for start in range(0, len(tokens), cuts):
        part = tuple(tokens[start : start + cuts])
        over = start + cuts >= len(tokens)
        finish, detail = (last or (Finish.LENGTH, None)) if over else (None, None)
        found = tuple(TokenLogprobs(token, -1.0, 1) for token in part) if params.logprobs is not None else ()
        one.feed(Delta("r", part, finish, detail, 0, 1, start + len(part), found))
        chunk = one.take()
        if chunk is not None:
            pieces.append(chunk.text)
            completion = gather.add(chunk)
            if completion is not None:
                assert "".join(pieces) == completion.text
                return completion
    raise AssertionError("it has not ended")


STOPS = [
    # text, stop, expected, matched
    ("one two END three", ("END",), "one two ", "END"),
    ("abx abc tail", ("abc",), "abx ", "abc"),  # a false start
    ("xabcd", ("abcd", "bc"), "xa", "bc"),  # complete first
    ("the very last END", ("END",), "the very last ", "END"),
    ("withheld EN", ("END",), "withheld EN", None),  # harmless after all
    ("aaab", ("aab",), "a", "aab"),
    ("Grüße 😀!", ("😀",), "Grüße ", "😀"),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("cuts", [1, 3, 100])
@pytest.mark.parametrize(("text", "stop", "expected", "matched"), STOPS)
def test_stop_strings_wherever_tokens_end(
    tokenizer: Any, text: str, stop: tuple[str, ...], expected: str, matched: str | None, cuts: int, include: bool
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    completion = stream(tokenizer, tokenizer.encode(text), params, cuts)
    assert completion.text == expected + (matched if include and matched else "")
    assert (completion.finish_reason, completion.detail) == (("stop", matched) if matched else ("length", None))


@pytest.mark.parametrize("cuts", [1, 2, 4, 6])
@pytest.mark.parametrize(("least", "expected"), [(0, "a"), (1, "a"), (3, "a b a"), (6, "a b a b a")])
def test_no_stop_before_min_tokens(tokenizer: Any, least: int, expected: str, cuts: int) -> None:
    tokens = tokenizer.encode("a b a b a b")
    assert len(tokens) == 6
    params = SamplingParams(stop=(" b",), min_tokens=least)
    assert stream(tokenizer, tokens, params, cuts).text == expected


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_text_only_if_asked(tokenizer: Any, include: bool) -> None:
    tokens = tokenizer.encode("one two")
    params = SamplingParams(include_stop_str_in_output=include, stop_token_ids=(tokens[-1],))
    last = (Finish.STOP, str(tokens[-1]))
    assert stream(tokenizer, tokens, params, last=last).text == ("one two" if include else "one")
    held = SamplingParams(include_stop_str_in_output=include, stop=("two!",))  # withheld when the mark comes
    assert stream(tokenizer, [*tokens, EOS], held, last=(Finish.STOP, str(EOS))).text == "one two"


def test_marks_are_shown_if_asked(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("hi"), 1, *tokenizer.encode("ho")]
    assert stream(tokenizer, tokens, SamplingParams()).text == "hiho"
    assert stream(tokenizer, tokens, SamplingParams(skip_special_tokens=False)).text == "hi<|im_start|>ho"
    shown = SamplingParams(skip_special_tokens=False, stop=("<|im_start|>",))
    assert stream(tokenizer, tokens, shown).text == "hi"


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=12), cuts=st.integers(1, 4), cut_off=st.integers(0, 3))
def test_bytes_of_tokens_are_the_text(tokenizer: Any, text: str, cuts: int, cut_off: int) -> None:
    """Whatever the characters: the pieces joined are the decoded whole, and log-probabilities know every byte."""
    tokens = tokenizer.encode(text)
    assume(tokens)  # some characters have no token
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace") == tokenizer.decode(tokens, False)
    some = tokens[: max(1, len(tokens) - cut_off)]
    completion = stream(tokenizer, some, SamplingParams(logprobs=0, skip_special_tokens=False), cuts)
    assert completion.text == tokenizer.decode(some, False)
    assert [one.token for one in completion.logprobs] == some


def test_log_probabilities_end_where_the_text_was_ended(tokenizer: Any) -> None:
    tokens = tokenizer.encode("one END three four")
    completion = stream(tokenizer, tokens, SamplingParams(stop=("END",), logprobs=0), 100)
    assert completion.text == "one "
    assert len(completion.logprobs) == len(completion.token_ids) < len(tokens)


@pytest.mark.parametrize(
    ("decoder", "piece", "expected"),
    [
        ("ByteLevel", "Ġthe", b" the"),
        ("ByteLevel", "ðŁĺ", b"\xf0\x9f\x98"),
        ("ByteLevel", "日", "日".encode()),  # no byte: it stands for itself
        ("ByteFallback", "<0xF0>", b"\xf0"),
        ("ByteFallback", "▁the", b" the"),
        ("Metaspace", "▁the", b" the"),
        (None, "the", b"the"),
    ],
)
def test_pieces_are_bytes(decoder: str | None, piece: str, expected: bytes) -> None:
    import tokenizers
    from tokenizers import decoders, models

    from engine.core.models.pieces import Pieces

    backend = tokenizers.Tokenizer(models.BPE())
    if decoder == "ByteFallback":
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    elif decoder is not None:
        backend.decoder = getattr(decoders, decoder)()
    assert Pieces(backend).bytes_of(piece) == expected
