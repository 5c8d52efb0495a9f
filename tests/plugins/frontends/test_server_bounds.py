"""No request is larger than it may be: not by what its body holds, nor by what it is told back (case B51)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from app_kit import post, refused
from hypothesis import given
from hypothesis import strategies as st

from engine import AsyncEngine, EngineConfig, InvalidRequest, QueueFull, SamplingParams
from engine.core.outputs import Chunk
from engine.core.sampling import TokenLogprobs
from engine.core.serve.asks import Ask
from engine.core.serve.link import Link
from engine.core.serve.messages import Submit
from engine.plugins.frontends._aside import AT_ONCE as THREADS
from engine.plugins.frontends._aside import EACH, MUCH, Aside
from engine.plugins.frontends._bounds import AT_ONCE, STRINGS_A_PART, Most, check_parts
from engine.plugins.frontends._endpoints import LARGE_BODY, is_large
from engine.plugins.frontends._openai_schema import CompletionRequest
from engine.plugins.frontends.openai import OpenAIFrontend, OpenAIOptions

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
TURN = {"role": "user", "content": "hi"}
CHAT = {"messages": [TURN], "max_tokens": 2}
MANY = 20_000  # lists, objects: more than a body may have

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='ab"\\[]{},:é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\{[,', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int]:
    """Lists and objects, strings, and separators of elements."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    counts = [counted(one) for one in inner]
    parts, strings, elements = (sum(one[at] for one in counts) for at in range(3))
    return parts + 1, strings, elements + max(0, len(value) - 1)


@given(JSON, st.integers(0, 6), st.none() | st.integers(0, 8))
def test_what_is_counted_is_what_is_there(value: Any, most: int, elements: int | None) -> None:
    parts, strings, separators = counted(value)
    separated = separators + 1 if separators else 0
    over = parts > most or strings > most * STRINGS_A_PART or (elements is not None and separated > elements)
    body = json.dumps(value, ensure_ascii=False).encode()
    if over:
        with pytest.raises(InvalidRequest, match="at most") as caught:
            check_parts(body, Most.body(most, elements), "here")
        assert (caught.value.field, caught.value.code) == ("here", "above_limit")
    else:
        check_parts(body, Most.body(most, elements))


@given(JSON, st.integers(0, 12))
def test_bytes_of_text_are_counted_as_they_are_written(value: Any, most: int) -> None:
    written = sum(len(json.dumps(one, ensure_ascii=False).encode()) for one in texts(value))
    body = json.dumps(value, ensure_ascii=False).encode()
    if written > most:
        with pytest.raises(InvalidRequest, match=f"has {written} bytes of text, at most {most} are allowed \\(so\\)"):
            check_parts(body, Most(text=most, option="so"))
    else:
        check_parts(body, Most(text=most))


def texts(value: Any) -> Iterator[str]:
    """All strings in it, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from texts(one)


@given(st.binary(max_size=40), st.integers(0, 3))
def test_what_is_no_json_is_counted_too(body: bytes, most: int) -> None:
    """No fault but one, and that only where there are as many marks."""
    marks = sum(map(body.count, (b"[", b"{", b'"', b",")))
    with contextlib.suppress(InvalidRequest) if marks >= most else contextlib.nullcontext():
        check_parts(body, Most.body(most, most))


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    yield OpenAIFrontend().app(engine)
    engine.shutdown()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**GOOD, "prompt": [[1]] * MANY}),
        ("/v1/completions", {**GOOD, "stop": ["x"] * 10 * MANY}),
        ("/v1/completions", {**GOOD, "prompt": [1] * (2**20 + MANY)}),
        ("/v1/completions", {**GOOD, "metadata": {str(n): "" for n in range(10 * MANY)}}),
        ("/v1/completions", {**GOOD, "logit_bias": {str(n): 1 for n in range(10 * MANY)}}),
        ("/v1/completions/render", {**GOOD, "prompt": [[1]] * MANY}),
        ("/v1/chat/completions", {"messages": [TURN] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}]}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * MANY}),
        ("/v1/responses", {"input": [{"type": "nonsense"}] * MANY}),
        ("/tokenize", {"messages": [TURN] * MANY}),
        ("/detokenize", {"tokens": [1] * (2**20 + MANY)}),
        ("/v1/cache/explain", {"prompt": [1] * (2**20 + MANY)}),
        ("/v1/cache/flush", {"tiers": [[]] * MANY}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(name for name in value if name not in ("max_tokens",)),
)
def test_more_than_a_body_may_hold(app: Any, path: str, body: dict[str, Any]) -> None:
    assert "at most" in refused(app, path, body, "body")


def test_text_is_not_counted(app: Any) -> None:
    """As much text as there is room for, whatever is written in it."""
    text = '{"a": [1, 2], "b": ["x"]}, ' * 900
    answer = post(app, "/v1/completions/render", {"prompt": text})
    assert answer.status_code == 400  # it has too many tokens, and is not refused before that is known
    assert answer.json()["error"]["param"] == "prompt"
    small = post(app, "/tokenize", {"prompt": '[{"' * 6000})
    assert small.status_code == 200
    assert small.json()["count"] > 1000


def test_a_lower_bound_may_be_set() -> None:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim", "max_waiting": 1}), in_process=True)
    try:
        app = OpenAIFrontend(OpenAIOptions(max_body_parts=64)).app(engine)
        body = {"messages": [{**TURN, "content": "word " * 80}] * 80}
        assert "at most 65" in refused(app, "/v1/chat/completions", body, "body")  # 64 run, 1 waits: so many prompts
    finally:
        engine.shutdown()


@pytest.mark.parametrize("at", [0, AT_ONCE - 1, AT_ONCE, 3 * AT_ONCE + 5])
def test_a_fault_in_a_long_list_is_named_at_its_place(app: Any, at: int) -> None:
    turns: list[dict[str, Any]] = [TURN] * (4 * AT_ONCE)
    turns = [*turns[:at], {"role": "bob", "content": "{x}"}, *turns[at + 1 :]]
    assert "'user'" in refused(
        app, "/v1/chat/completions", {"messages": turns}, f"messages[{at}].role", "invalid_value"
    )
    words = refused(app, "/v1/responses", {"input": turns}, f"input[{at}].role", "invalid_value")
    assert "'user'" in words


def test_a_long_conversation_is_served(app: Any) -> None:
    answer = post(app, "/v1/chat/completions/render", {"messages": [{**TURN, "content": "a"}] * 900})
    assert answer.status_code == 200
    assert answer.json()["data"][0]["prompt"].count("user\na") == 900


LONG = "k" * 100_000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({**GOOD, LONG: 1}, 400),
        ({**GOOD, "cache": {LONG: 1}}, 400),
        ({**GOOD, "logit_bias": {LONG: 1}}, 400),
        ({**GOOD, "logit_bias": {LONG: "x"}}, 400),
        ({**GOOD, "metadata": {LONG: 1}}, 400),
        ({**GOOD, "temperature": LONG}, 400),
        ({**GOOD, "model": LONG}, 404),
        ({**GOOD, "best_of": LONG}, 400),
    ],
    ids=lambda value: ascii(value)[46:70],
)
def test_what_clients_made_up_is_not_told_back_at_length(app: Any, body: dict[str, Any], status: int) -> None:
    answer = post(app, "/v1/completions", body)
    assert answer.status_code == status
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"metadata": {"a": "x" * 70_000}}, "metadata", "above_limit"),
        ({"metadata": {str(n): "" for n in range(20_000)}}, "metadata", "above_limit"),
        ({"user": "x" * 1025}, "user", "invalid_value"),
        ({"prompt_cache_key": "x" * 1025}, "prompt_cache_key", "invalid_value"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "invalid_value"),
        ({"cache": {"salt": "x" * 1025}}, "cache.salt", "invalid_value"),
        ({"n": 128, "logprobs": 20, "max_tokens": 1000}, "logprobs", "above_limit"),
        ({"n": 128, "logprobs": 20, "max_tokens": None}, "logprobs", "above_limit"),
        ({"prompt": [[1]] * 1000, "logprobs": 20, "max_tokens": 100}, "logprobs", "above_limit"),
    ],
    ids=str,
)
def test_what_every_choice_carries_or_brings_is_bounded(
    app: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    refused(app, "/v1/completions", {**GOOD, **fields}, param, code)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {**GOOD, "stream": True, "stream_options": {"include_obfuscation": 0}},
         "stream_options.include_obfuscation"),
        ("/v1/responses", {"input": "x", "store": 0}, "store"),
        ("/v1/responses", {"input": "x", "background": 0}, "background"),
        ("/v1/responses", {"input": "x", "background": True}, "background"),
        ("/v1/completions", {**GOOD, "structured_outputs": {"choice": ["a"], "disable_any_whitespace": 0}},
         "structured_outputs.disable_any_whitespace"),
    ],
)  # fmt: skip
def test_nought_is_not_false(app: Any, path: str, body: dict[str, Any], param: str) -> None:
    refused(app, path, body, param, "invalid_value")


def test_blanks_without_end_are_refused_before_all_are_read(app: Any) -> None:
    """They have few tokens a character: looks at the beginning grow, until there are too many."""
    words = refused(app, "/v1/completions", {**GOOD, "prompt": " " * 2_000_000}, "prompt")
    assert "of which the first 1048576 alone" in words


def test_large_answers_are_put_into_words_elsewhere() -> None:
    import threading

    one = TokenLogprobs(1, -1.0, 1, (1, 2, 3), (-1.0, -2.0, -3.0))

    async def main() -> None:
        aside, here = Aside(), threading.get_ident()

        async def where(count: int) -> int:
            return await aside.build([Chunk("x", (1,), logprobs=(one,) * count)], threading.get_ident)

        assert await where(0) == await where(MUCH // 4 - 1) == here
        assert await where(MUCH // 4) != here
        assert await aside.build([Chunk("x", (1,))] * (MUCH // EACH), threading.get_ident) == here
        assert await aside.build([Chunk("x", (1,))] * (MUCH // EACH + 1), threading.get_ident) != here

    asyncio.run(main())


def test_few_threads_work_at_once_also_for_those_who_have_left() -> None:
    """Whoever stops waiting leaves a thread behind that still computes: it counts until it has ended."""
    import threading

    async def main() -> None:
        aside, begun, go = Aside(), threading.Semaphore(0), threading.Event()

        def work() -> int:
            begun.release()
            go.wait(60)
            return threading.get_ident()

        tasks = [asyncio.create_task(aside.run(work)) for _ in range(THREADS + 2)]
        for _ in range(THREADS):
            assert await asyncio.to_thread(begun.acquire, timeout=60)
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert not begun.acquire(blocking=False)
        go.set()
        others = await asyncio.gather(*tasks[1:])
        assert threading.get_ident() not in others
        with pytest.raises(InvalidRequest):
            await aside.run(lambda: check_parts(b"[[]]", Most(1)))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello there " * 2000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [1000] * 8000}),
        ("/v1/completions/render", {"prompt": [[5] * 100] * 100}),
        ("/v1/completions", {"prompt": [[5] * 100] * 100, "max_tokens": 1}),
    ],
)
def test_large_bodies_are_read_and_answered_elsewhere(
    app: Any, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is decoded, tokenised and written of them: not where health is answered."""
    import threading

    from engine.core.models.tokenizer import Tokenizer

    here, seen = threading.get_ident(), set()

    def watched(kind: type[Any], name: str) -> None:
        real = getattr(kind, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.add(threading.get_ident())
            return real(*arguments, **options)

        monkeypatch.setattr(kind, name, call)

    for kind, name in ((Tokenizer, "encode"), (Tokenizer, "decode"), (Ask, "check"), (CompletionRequest, "parse")):
        if "completions" not in path or "render" in path or kind is not Tokenizer:
            watched(kind, name)
    assert post(app, path, body).status_code == 200
    assert seen
    assert here not in seen


@pytest.mark.parametrize(
    ("body", "large"),
    [
        ({"prompt": [[1]] * 63}, False),
        ({"prompt": [[1]] * 64}, True),
        ({"prompt": ["x"] * 127}, False),
        ({"prompt": ["x"] * 128}, True),
        ({"prompt": [1] * 4000}, False),
        ({"prompt": "x" * LARGE_BODY}, True),
    ],
)
def test_small_bodies_with_many_prompts_are_large(body: dict[str, Any], large: bool) -> None:
    assert is_large(json.dumps(body).encode()) == large


@pytest.mark.parametrize(
    ("asked", "elsewhere"),
    [({"n": 64}, False), ({"n": 65}, True), ({"prompt": [[1] * 700] * 90}, True), ({"prompt": ["x"] * 65}, True)],
)
def test_many_requests_of_one_body_are_made_elsewhere(
    app: Any, asked: dict[str, Any], elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    here, seen = threading.get_ident(), set()
    real = Link.pack

    def pack(link: Link, command: Any) -> Any:
        if isinstance(command, Submit):
            seen.add(threading.get_ident())
        return real(link, command)

    monkeypatch.setattr(Link, "pack", pack)
    answer = post(app, "/v1/completions", {**GOOD, **asked})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == asked.get("n", len(asked.get("prompt", [])))
    assert len(seen) == 1
    assert (here not in seen) == elsewhere


def test_health_is_answered_while_bodies_are_refused_and_answers_are_large(server: Any) -> None:
    """Nothing of it is done where health is answered."""
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {**GOOD, "prompt": [[1]] * 1_500_000}),
        ("/v1/responses", {"input": [{"type": "x"}] * 500_000}),
        ("/v1/completions", {**GOOD, "prompt": list(range(3000)), "logprobs": 20, "echo": True}),
    ]
    for path, body in bodies:
        data = json.dumps(body, separators=(",", ":")).encode()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{server.url}{path}", content=data, timeout=60)
            slowest = 0.0
            while not asked.done():
                slowest = max(slowest, server.http.get("/health/live").elapsed.total_seconds())
        assert asked.result().status_code == (200 if "echo" in body else 400)
        assert slowest < 5  # generous: where it is done in one go it takes many times as long


def test_log_probabilities_of_all_open_requests_are_bounded_together() -> None:
    """Each alone is within its limit; together they would fill memory. What has ended makes room."""
    fields = {"executor": {"name": "sim", "step_ms": 5}, "max_output_logprobs": 1000}

    async def main() -> None:
        engine = AsyncEngine.launch(EngineConfig.model_validate(fields), in_process=True)
        try:
            wish = SamplingParams(max_tokens=100, logprobs=9, ignore_eos=True)
            groups = [engine.submit_many([Ask(tokens=[1, 2], params=wish)]) for _ in range(8)]
            with pytest.raises(QueueFull, match="8000 log-probabilities, at most 8000") as caught:
                engine.submit_many([Ask(tokens=[1], params=SamplingParams(max_tokens=1, logprobs=0))])
            assert caught.value.retry_after
            with pytest.raises(QueueFull, match="no room for 2 more"):
                engine.submit_many([Ask(tokens=[1], params=SamplingParams(max_tokens=1, prompt_logprobs=1))])
            plain = engine.submit_many([Ask(tokens=[1], params=SamplingParams(max_tokens=1))])
            groups[0].abort()
            engine.submit_many([Ask(tokens=[1, 2], params=wish)]).abort()
            for group in (*groups, plain):
                group.abort()
            assert engine.ledger.logprobs == 0
            asks = [Ask(tokens=[1] * 2000, params=SamplingParams(prompt_logprobs=20)) for _ in range(2)]
            with pytest.raises(InvalidRequest, match="all prompts' log-probabilities come to 84000"):
                engine.submit_many(asks)
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(("field", "good", "bad"), [("logit_bias", 1.0, "x"), ("metadata", "x", 1)])
@pytest.mark.parametrize("at", [0, AT_ONCE, 3 * AT_ONCE])
def test_a_fault_in_a_large_object_is_named_at_its_place(app: Any, field: str, good: Any, bad: Any, at: int) -> None:
    values = {str(number): good for number in range(3 * AT_ONCE + 1)}
    assert post(app, "/v1/completions/render", {**GOOD, field: values}).status_code == 200
    refused(app, "/v1/completions", {**GOOD, field: {**values, str(at): bad}}, f"{field}.{at}", "invalid_value")
