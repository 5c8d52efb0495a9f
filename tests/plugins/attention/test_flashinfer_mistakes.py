"""The stand-in and the suite see every mistake in how FlashInfer is called: each is made on purpose, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import flashinfer_standin as library
import pytest
import torch
from flashinfer_kit import ROWS, SHARING, SMALL, close, expected, memory, on

from engine.core.registry import Found
from engine.plugins.attention.flashinfer import FlashInferAttention
from engine.testing import AttentionSuite
from engine.testing.checking import check

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
BATCH, CASCADE = "BatchAttention", "MultiLevelCascadeAttentionWrapper"
WRAPPERS = (DECODE, PREFILL, BATCH, CASCADE)

KINDS = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})

Change = Callable[[list[Any], dict[str, Any]], None]


def changed(wrapper: str, method: str, change: Change) -> Any:
    """The stand-in, as called by somebody who calls this method otherwise."""
    honest = getattr(library, wrapper)

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        given = list(args)
        change(given, keywords)
        return getattr(honest, method)(self, *given, **keywords)

    other = type(wrapper, (honest,), {method: call})
    return SimpleNamespace(**{**{name: getattr(library, name) for name in WRAPPERS}, wrapper: other})


def without(name: str) -> Change:
    return lambda args, keywords: keywords.pop(name)


def put(at: int, value: Callable[[Any], Any]) -> Change:
    def change(args: list[Any], keywords: dict[str, Any]) -> None:
        args[at] = value(args[at])

    return change


def other(name: str, value: Any) -> Change:
    return lambda args, keywords: keywords.update({name: value})


def moved(name: str, by: int) -> Change:
    def change(args: list[Any], keywords: dict[str, Any]) -> None:
        keywords[name] += by if keywords[name] >= 0 else 0

    return change


def upside_down(args: list[Any], keywords: dict[str, Any]) -> None:
    """The last level first."""
    args[:4] = [levels[::-1] for levels in args[:4]]


def twice(args: list[Any], keywords: dict[str, Any]) -> None:
    """What is each row's own has the shared pages, too."""
    offsets, pages = args[1][1].tolist(), args[2][1].tolist()
    shared, every = args[2][0].tolist(), []
    for first, last in pairwise(offsets):
        every += shared + pages[first:last]
    args[1] = [args[1][0], args[1][1] + torch.arange(len(offsets), dtype=torch.int32) * len(shared)]
    args[2] = [args[2][0], torch.tensor(every, dtype=torch.int32)]


def heads_swapped(args: list[Any], keywords: dict[str, Any]) -> None:
    args[3:5] = args[4:2:-1]


def zero_based(last: torch.Tensor) -> torch.Tensor:
    """The remainder, which is 0 where the last page is full."""
    return last % 4


MISTAKES: dict[str, tuple[str, str, Change, dict[str, Any], str]] = {
    "the mask is forgotten": (PREFILL, "plan", without("causal"), {}, r"reads \[0, 1"),
    "the mask of one kernel for all is forgotten": (BATCH, "plan", without("causal"), {"mixed": "batch"}, "reads"),
    "a full last page counts as empty": (DECODE, "plan", put(2, zero_based), {}, "off by|nan|NaN|comes from"),
    "so it does for prefills": (PREFILL, "plan", put(3, zero_based), {}, "off by|comes from|reads"),
    "last pages for lengths": (BATCH, "plan", put(3, zero_based), {"mixed": "batch"}, "not of last pages"),
    "the type is left to the default": (DECODE, "plan", without("q_data_type"), {}, "does not match the q_data_type"),
    "the type of prefills is": (PREFILL, "plan", without("q_data_type"), {}, "does not match the q_data_type"),
    "the scale is left to the default": (DECODE, "plan", without("sm_scale"), {}, "off by|with a scale"),
    "the scale of prefills is": (PREFILL, "plan", without("sm_scale"), {}, "off by|with a scale"),
    "offsets are long": (DECODE, "plan", put(0, torch.Tensor.long), {}, "must be a row of int32"),
    "offsets count tokens": (PREFILL, "plan", put(1, lambda offsets: offsets * 4), {}, "index|off by|comes from|size"),
    "query and page offsets change places": (
        PREFILL, "plan", lambda args, _: args.__setitem__(slice(0, 2), args[1::-1]), {}, "does not match qo_indptr",
    ),
    "heads change places": (DECODE, "plan", heads_swapped, {}, "over 8 KV heads"),
    "an argument that it does not know": (DECODE, "plan", other("scale", 0.3), {}, "unexpected keyword argument"),
    "a layout that is not ours": (PREFILL, "__init__", put(1, lambda _: "HND"), {}, "HND"),
    "a window where none was asked for": (PREFILL, "plan", other("window_left", 3), {}, "off by|reads"),
    "K and V in one list": (DECODE, "run", put(1, list), {}, "must be a pair"),
    "the answer goes somewhere else": (PREFILL, "run", without("out"), {}, "memory that nobody wrote"),
    "the sums are asked for": (PREFILL, "run", other("return_lse", True), {}, "not tuple"),
    "a scale for what was never scaled": (DECODE, "plan", other("logits_soft_cap", 0.5), {}, "off by"),
}  # fmt: skip


class Quick(AttentionSuite):
    page_sizes = (4, 1)
    dtypes = ("bfloat16",)
    head_dims = (64,)
    head_shapes = ((2, 2), (8, 2))
    long_context = 100


FEATURES: dict[str, tuple[str, str, Change, dict[str, Any], dict[str, Any]]] = {
    "a window that ends one too late": (DECODE, "plan", moved("window_left", 1), {}, {"window": 4}),
    "or one too early, for prefills": (PREFILL, "plan", moved("window_left", -1), {}, {"window": 4}),
    "a window that is forgotten": (PREFILL, "plan", without("window_left"), {}, {"window": 4}),
    "a cap that is forgotten": (DECODE, "plan", without("logits_soft_cap"), {}, {"soft_cap": 0.5}),
    "a cap that is planned and not run": (
        BATCH,
        "run",
        without("logits_soft_cap"),
        {"mixed": "batch"},
        {"soft_cap": 0.5},
    ),
    "a cap that is run and not planned": (
        BATCH,
        "plan",
        without("logits_soft_cap"),
        {"mixed": "batch"},
        {"soft_cap": 0.5},
    ),
    "a cascade without its own cap": (CASCADE, "plan", without("logits_soft_cap"), SHARING, {"soft_cap": 0.5}),
    "a cascade in the default type": (CASCADE, "plan", without("q_data_type"), SHARING, {}),
    "a cascade with a window": (CASCADE, "plan", other("window_left", 8), SHARING, {}),
    "a cascade whose shared pages count twice": (CASCADE, "plan", twice, SHARING, {}),
    "a cascade whose levels change places": (CASCADE, "plan", upside_down, SHARING, {}),
    "a cascade with one level": (CASCADE, "__init__", put(0, lambda levels: 1), SHARING, {}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_mistake_in_a_feature_is_seen(name: str) -> None:
    wrapper, method, change, options, features = FEATURES[name]
    given = memory(ROWS, shared=32)
    for tampered, right in ((library, True), (changed(wrapper, method, change), False)):
        backend = on(tampered)(FlashInferAttention.Options(**SMALL, **options))
        backend.plan_batch(given.batch)
        backend.write(given.keys, given.values, given.k_pages, given.v_pages)
        wanted = expected(given, 0.2, **{"window": None, "soft_cap": None, **features})
        if right:
            close(backend.attend(given.query, given.k_pages, given.v_pages, 0.2, **features), wanted)
        else:
            with pytest.raises((AssertionError, ValueError, RuntimeError)):
                close(backend.attend(given.query, given.k_pages, given.v_pages, 0.2, **features), wanted)


def finding(tampered: Any, options: dict[str, Any]) -> Any:
    mistaken = type("Mistaken", (on(tampered),), {"__doc__": "Plain layers alone.", "provides": KINDS})
    settings = {
        "plugin": mistaken, "options": {**SMALL, **options}, "origin": Found("attention", mistaken, "local code", ""),
    }  # fmt: skip
    return check(type("Mistakes", (Quick,), settings)).finding


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str) -> None:
    wrapper, method, change, options, words = MISTAKES[name]
    found = finding(changed(wrapper, method, change), options)
    assert found is not None, f"nobody sees that {name}"
    assert re.search(words, found.words), found


def test_without_a_mistake_nothing_is_seen() -> None:
    assert finding(changed(DECODE, "plan", lambda args, keywords: None), {}) is None
