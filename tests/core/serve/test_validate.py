"""What every request is checked for: types as exactly as the way to another process needs them, and bounds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import InvalidRequest, SamplingParams
from engine.core.protocols import Limits
from engine.core.sampling import SAMPLING
from engine.core.serve.messages import Add, Submit, decode_command, encode, refusals
from engine.core.validate import check_fields, validate

LIMITS = Limits(max_model_len=64, max_batch_tokens=16, max_running=2, page_size=4, num_pages=8, vocab_size=99,
                sampling=SAMPLING)  # fmt: skip
HUGE = 10**5000  # Python refuses to print it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", np.int64(5)),
        ("max_tokens", HUGE),
        ("min_tokens", None),
        ("min_tokens", 2**70),
        ("min_tokens", 64),  # more than the room, although max_tokens is not set
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", np.float64(1)),
        ("temperature", math.nan),
        ("temperature", HUGE),
        ("top_p", "0.5"),
        ("top_p", math.nan),
        ("top_k", 1.0),
        ("top_k", 2**70),
        ("top_k", HUGE),
        ("seed", 1.5),
        ("seed", HUGE),
        ("stop", "END"),
        ("stop", b"END"),
        ("stop", {"END"}),
        ("stop", (1,)),
        ("stop", None),
        ("stop", ("\ud800",)),
        ("stop_token_ids", 3),
        ("stop_token_ids", (3.0,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", (HUGE,)),
        ("min_p", 1.1),
        ("min_p", "0.1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 11),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("frequency_penalty", -3),
        ("frequency_penalty", math.inf),
        ("logit_bias", [(1, 1.0)]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {99: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: "1"}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("n", 0),
        ("n", 129),
        ("n", 2.0),
        ("choice", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 1.0),
        ("prompt_logprobs", HUGE),
        ("stop_token_ids", tuple([1] * 129)),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
        ("ignore_eos", 1),
        ("ignore_eos", "no"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_sampling_parameters_are_typed_and_bounded(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate([1, 2], SamplingParams(**{field: value}), LIMITS)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


PROMPTS: dict[str, Any] = {
    "list of token ids, not str": "ab",
    "not bytes": b"ab",
    "not NoneType": None,
    "not int": 5,
    "not numpy.ndarray": np.array([1, 2]),
    "integers, not numpy.int64": [np.int64(1)],
    "integers, not bool": [1, True],
    "integers, not str": [1, "2"],
    "an integer of 16610 bits is outside": [HUGE],
}


@pytest.mark.parametrize("words", PROMPTS)
def test_prompts_are_lists_of_integers(words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        validate(PROMPTS[words], SamplingParams(), LIMITS)
    assert caught.value.field == "prompt"


def test_params_are_params() -> None:
    with pytest.raises(InvalidRequest, match="params: must be SamplingParams, not dict"):
        validate([1], {"max_tokens": 3}, LIMITS)  # type: ignore[arg-type]


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": "high"},
        {"priority": None},
        {"priority": 1.0},
        {"priority": 2**64},
        {"priority": -HUGE},
        {"salt": None},
        {"salt": 5},
        {"salt": "\ud800"},
        {"adapter": None},
        {"request_id": 5},
        {"request_id": "\ud800"},
        {"read_cache": 1},
        {"write_cache": None},
        {"deadline": -1},
        {"deadline": math.nan},
        {"deadline": "5"},
        {"metadata": [1]},
        {"metadata": {1: "a"}},
        {"metadata": {"a": {1: "a"}}},
        {"metadata": {"a": object()}},
        {"metadata": {"a": {1, 2}}},
        {"metadata": {"a": b"raw"}},
        {"metadata": {"a": [2**64]}},
        {"metadata": {"a": "\ud800"}},
        {"metadata": deep(50)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_request_carries_is_typed_and_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_fields(**fields)
    assert caught.value.field == next(iter(fields))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    seed=st.none() | st.integers(),
    top_k=st.integers(),
    temperature=st.floats() | st.integers(),
    stop=st.lists(st.text(min_size=1), max_size=3) | st.text(),
    priority=st.integers(),
    salt=st.none() | st.text(),
    metadata=st.none() | st.dictionaries(st.text() | st.integers(), PLAIN),
    bias=st.dictionaries(st.integers(-1, 99), st.floats(-101, 101), max_size=3),
    logprobs=st.none() | st.integers(-1, 21),
    deadline=st.none() | st.floats() | st.integers(),
)
def test_what_is_accepted_arrives_in_the_other_process(
    seed: Any, top_k: int, temperature: Any, stop: Any, priority: int, salt: Any, metadata: Any,
    bias: dict[int, float], logprobs: int | None, deadline: Any,
) -> None:  # fmt: skip
    params = SamplingParams(
        seed=seed, top_k=top_k, temperature=temperature, stop=tuple(stop) if isinstance(stop, list) else stop,
        logit_bias=bias, logprobs=logprobs, prompt_logprobs=logprobs,
    )  # fmt: skip
    try:
        validate([1], params, LIMITS)
        check_fields(priority=priority, salt=salt, metadata=metadata, deadline=deadline)
    except InvalidRequest:
        return
    sent = Submit([Add("a", [1], params, priority, salt, metadata, False, False, deadline)])
    assert decode_command(encode(sent)) == sent


def test_what_cannot_travel_is_refused_when_it_is_sent() -> None:
    for bad in (2**70, object()):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            encode(Submit([Add("a", [1], SamplingParams(), metadata={"a": bad})]))


def test_a_command_that_cannot_be_read_is_refused_request_by_request() -> None:
    data = encode(Submit([Add("a", [1], SamplingParams()), Add("b", [1], SamplingParams(max_tokens=1.5))]))  # type: ignore[arg-type]
    with pytest.raises(msgspec.DecodeError) as caught:
        decode_command(data)
    answers = refusals(data, caught.value)
    assert [(answer.request_id, answer.field) for answer in answers] == [("a", "request"), ("b", "request")]
    assert "Expected `int | null`, got `float`" in answers[0].message
    assert refusals(b"\x00garbage", caught.value) == []
