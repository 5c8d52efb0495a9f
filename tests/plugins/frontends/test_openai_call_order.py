"""Answers with calls, whole and in pieces of any size: the same words, calls and items, in the order of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.core import SamplingParams
from engine.core.outputs import Chunk, Completion
from engine.core.registry import make
from engine.core.sampling import TokenLogprobs
from engine.core.tools import Tool
from engine.plugins.frontends._openai_answers import ChatAnswers, Wish
from engine.plugins.frontends._openai_response_events import ResponseEvents
from engine.plugins.frontends._openai_responses import ResponsesRequest
from engine.plugins.frontends._openai_tools import Toolset
from engine.plugins.frontends._wire import to_json

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
AROUND = f"Hi.{CALL}\nDone."
TWO = f"Hi. {CALL}\n{CALL}"
BROKEN = "[f(a=1]"  # the call is told, and turns out to be broken, with the same character


class Letters:
    """A tokenizer whose tokens are given texts."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()


class Case:
    """An answer as tokens that cut it every few characters."""

    def __init__(self, text: str, size: int, *, parser: str = "hermes", parallel: bool = True, logs: bool = False):
        self.pieces = [text[at : at + size] for at in range(0, len(text), size)]
        toolset = Toolset((Tool("f"),), parallel=parallel)
        self.wish = Wish(
            SamplingParams(logprobs=0 if logs else None), toolset=toolset, parser=make("tool_parser", parser)
        )
        self.found = [TokenLogprobs(token, -1.0, 1, (), ()) for token in range(len(self.pieces))] if logs else []
        self.text, self.include = text, ["message.output_text.logprobs"] if logs else None

    @property
    def whole(self) -> Completion:
        ids = tuple(range(len(self.pieces)))
        return Completion(self.text, ids, "stop", None, 1, 0, tuple(self.found) or None)

    @property
    def chunks(self) -> list[Chunk]:
        last = len(self.pieces) - 1
        return [
            Chunk(
                text,
                (token,),
                "stop" if token == last else None,
                None,
                1,
                token + 1,
                0,
                tuple(self.found[token : token + 1]),
            )
            for token, text in enumerate(self.pieces)
        ]

    def events(self) -> ResponseEvents:
        body = ResponsesRequest.model_validate({"input": "hi", "include": self.include})
        return ResponseEvents("m", body, self.wish, Letters(self.pieces))  # type: ignore[arg-type]

    def responses(self) -> tuple[list[Any], list[Any]]:
        """The items of a whole response, and of a stream's."""
        events, streamed = self.events(), self.events()
        for chunk in self.chunks:
            streamed.piece(chunk)
        streamed._close()
        streamed.end(self.chunks[-1])
        return items(events.whole(self.whole)), items(streamed.response)

    def chats(self) -> tuple[Any, Any]:
        """Words and names of a whole conversation's answer, and of a stream's."""
        answers, streamed = (ChatAnswers("m", self.wish, Letters(self.pieces)) for _ in range(2))  # type: ignore[arg-type]
        message = answers.whole([self.whole])["choices"][0]["message"]
        content, names = "", []
        for event in filter(None, (streamed.piece(0, chunk) for chunk in self.chunks)):
            delta = event["choices"][0]["delta"]
            content += delta.get("content", "")
            names += [call["function"]["name"] for call in delta.get("tool_calls", ()) if "id" in call]
        return (message["content"], [call["function"]["name"] for call in message["tool_calls"]]), (content, names)


def items(response: Any) -> list[Any]:
    return [
        item["content"][0]["text"] if item["type"] == "message" else (item["name"], item["arguments"])
        for item in response["output"]
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "parser", "parallel", "expected"),
    [
        (AROUND, "hermes", True, ["Hi.", ("f", '{"a": 1}'), "\nDone."]),
        (AROUND, "hermes", False, ["Hi.", ("f", '{"a": 1}')]),
        (TWO, "hermes", True, ["Hi.", ("f", '{"a": 1}'), ("f", '{"a": 1}')]),
        (TWO, "hermes", False, ["Hi.", ("f", '{"a": 1}')]),
        (BROKEN, "pythonic", True, [("f", '{"a": 1}'), "]"]),
        (BROKEN, "pythonic", False, [("f", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_items_stand_in_the_order_of_the_text(text: str, parser: str, parallel: bool, expected: Any, size: int) -> None:
    assert Case(text, size, parser=parser, parallel=parallel).responses() == (expected, expected)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("parallel", "content"), [(True, "Hi.\nDone."), (False, "Hi.")])
def test_what_comes_after_the_one_call_is_left_out(size: int, parallel: bool, content: str) -> None:
    assert Case(AROUND, size, parallel=parallel).chats() == ((content, ["f"]), (content, ["f"]))


@pytest.mark.parametrize("size", [1, 3, 7])
def test_log_probabilities_do_not_cut_a_call(size: int) -> None:
    """Those of words are told with the words; those of a call are not, and change nothing of it."""
    case = Case(AROUND, size, logs=True)
    assert case.responses() == (["Hi.", ("f", '{"a": 1}'), "\nDone."],) * 2
    events, streamed = case.events(), case.events()
    for chunk in case.chunks:
        streamed.piece(chunk)
    whole = events.whole(case.whole)["output"]
    for item, same in zip(whole, streamed.response["output"], strict=True):
        if item["type"] == "message":
            [part], [other] = json.loads(to_json(item["content"])), json.loads(to_json(same["content"]))
            assert part["logprobs"] == other["logprobs"]
            assert part["text"].strip() in "".join(one["token"] for one in part["logprobs"])
