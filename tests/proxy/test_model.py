"""The default model behind a proxy: the same text as one engine, from KV that came over; OpenAI's own client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from engine.core.config import DEFAULT_MODEL

pytestmark = pytest.mark.model
STYLES = ("vllm", "sglang")
RULES = "You are a guide in a museum of old clocks. You are brief, you are kind, and you never invent anything. "
QUESTIONS = (
    "What is a pendulum?", "Who made the first watch?", "How long is an hour?", "Why does it tick?",
    "What is brass?", "Name three clocks.",
)  # fmt: skip


@pytest.fixture(scope="module")
def engines(started):
    return started("prefill", "decode", executor="torch", kv_memory="64MiB", audit=False)


def conversation(style, question):
    """The salt is in the beginning: neither style finds what the other has left."""
    return [{"role": "system", "content": f"{style}. {RULES}"}, {"role": "user", "content": question}]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("style", STYLES)
def test_a_dozen_prompts_have_the_text_of_one_engine(style, engines, proxied):
    giver, taker = engines
    proxy = proxied(prefill=[giver], decode=[taker], style=style)

    def ask(http, question):
        body = {"messages": conversation(style, question), "max_tokens": 6, "temperature": 0}
        return http.post("/v1/chat/completions", json=body).raise_for_status().json()

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda question: ask(proxy.http, question), QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        alone = ask(giver.http, question)
        assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"] != ""
    assert proxy.count("pairings", how="handed") == len(QUESTIONS)
    if style == "vllm":
        assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for answer in answers)
    assert taker.metrics()["engine_loaded_tokens_total"] > 0
    for engine in engines:
        engine.idle()


def test_openais_own_client(engines, proxied):
    giver, taker = engines
    proxy = proxied(prefill=[giver], decode=[taker], api_key="sesame")
    with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="sesame", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
        wish = {"model": DEFAULT_MODEL, "messages": conversation("sdk", "Hello?"), "max_tokens": 6, "temperature": 0}
        whole = client.chat.completions.create(**wish)
        with client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}) as stream:
            pieces = list(stream)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert whole.usage.prompt_tokens_details.cached_tokens > 0
        completion = client.completions.create(model=DEFAULT_MODEL, prompt="The capital of France is", max_tokens=3)
        assert completion.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError) as told:
            client.chat.completions.create(**wish, metadata={"kv_from": "h:1"})
        assert told.value.param == "metadata.kv_from"
    wrong = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
