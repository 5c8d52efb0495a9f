"""Prompts computed by one engine, continued by another: every scheduler, every cache, every connector, one text.

Two ``engine serve`` and an ``engine proxy``, each a process of its own, and the default model: twenty prompts at once
on one pair of scheduler and cache; with ``-m slow`` also on the pair of the two others, and sixty at once on every
pair. The oracle is the first engine asked alone. A connector whose library does not import is skipped, and says so.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from engine.core import ConfigError
from engine.core.config import DEFAULT_MODEL
from engine.core.registry import make

pytestmark = pytest.mark.model

PAIRS = list(itertools.product(("unified", "radix"), ("paged", "radix")))
CASES = [
    pytest.param(("unified", "radix", 3), id="unified-radix"),
    pytest.param(("radix", "paged", 3), id="radix-paged", marks=pytest.mark.slow),
    *(pytest.param((*pair, 1), id="-".join((*pair, "sixty")), marks=pytest.mark.slow) for pair in PAIRS),
]
CONNECTORS = ("local", "nixl", "mooncake")
START_SECONDS = 120.0
NEW_TOKENS = 8
STORY = (
    "The lighthouse keeper counted the ships each evening and wrote their names in a book. When the fog came he rang "
    "the bell twice for every name, and the crews answered with their horns. One night a ship answered that was in no "
    "book, and he wondered whether to write it down. "
)


def missing(connector: str) -> str:
    """Why its library cannot be had; empty where it can."""
    try:
        make("connector", connector).close()
    except ConfigError as error:
        return str(error)
    return ""


HERE = [name for name in CONNECTORS if not missing(name)]


class Command:
    """``engine …`` in a process of its own, until ``close``."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from engine.cli import main; main()", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._said = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=120)

    def listening(self) -> Command:
        assert self._said.wait(START_SECONDS), self.lines
        found = re.search(r"listening on (\S+)", "".join(self.lines))
        assert found is not None, self.lines
        self.http.base_url = self.url = found[1]
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "listening on" in line:
                self._said.set()
        self._said.set()

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        return {name: float(value) for name, value in (li.rsplit(" ", 1) for li in lines if not li.startswith("#"))}

    def ask(self, prompt: str) -> tuple[str, int]:
        """Text, and how many tokens of the prompt were cached."""
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    def ask_all(self, prompts: list[str]) -> list[tuple[str, int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.ask, prompts))

    def close(self) -> None:
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.lines
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def sixty() -> list[str]:
    """Sixty of 10 to 80 words; ten families that begin alike."""
    rng, words = random.Random(5), STORY.split()
    made = []
    for family in range(10):
        start = rng.randrange(len(words))
        base = (words[start:] + words)[: 10 + 4 * family]
        made += [" ".join([*base, *rng.sample(words, rng.randrange(1, 30))]) for _ in range(6)]
    return made


@pytest.fixture(scope="module", params=CASES)
def pair(request, sixty):
    """An engine that computes prompts, one that goes on with them, the prompts, and the text of the first alone."""
    scheduler, kvcache, every = request.param
    prompts = sixty[::every]
    chosen = ["--scheduler", scheduler, "--kvcache", kvcache, "--page-size", "8", "--num-pages", "1600"]
    for name in HERE:
        chosen += ["--connector", name, f"--connector.{name}.patience", "30"]
    engines = [Command("serve", "--port", "0", "--role", role, *chosen) for role in ("prefill", "decode")]
    try:
        prefill, decode = [engine.listening() for engine in engines]
        yield prefill, decode, prompts, [text for text, _ in prefill.ask_all(prompts)]
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("connector", CONNECTORS)
def test_the_text_is_that_of_one_engine(pair, connector):
    if connector not in HERE:
        pytest.skip(f"connector {connector}: its library is not here: {missing(connector)}")
    prefill, decode, prompts, alone = pair
    for style, asked in (("vllm", slice(None)), ("sglang", slice(0, None, 3))):
        decode.http.post("/v1/cache/flush", json={}).raise_for_status()
        before, hits = decode.metrics(), prefill.metrics()
        front = Command(
            "proxy", "--port", "0", "--connector", connector, "--style", style, "--prefill-required",
            "--prefill", prefill.url, "--decode", decode.url, "--prefill-timeout", "120",
        )  # fmt: skip
        try:
            answers = front.listening().ask_all(prompts[asked])
        finally:
            front.close()
        assert [text for text, _ in answers] == alone[asked]
        after = decode.metrics()
        taken = f'engine_connector{{connector="{connector}",name="pages_taken"}}'
        assert after[taken] > before[taken], "nothing came over"
        assert sum(cached for _, cached in answers) > 0, "no prefix hit where prompts are continued"
        hit = "engine_cached_tokens_total"
        assert prefill.metrics()[hit] > hits[hit], "no prefix hit where prompts are computed"


def test_openais_own_client(pair):
    prefill, decode, *_ = pair
    front = Command("proxy", "--port", "0", "--api-key", "sesame", "--prefill", prefill.url, "--decode", decode.url)
    try:
        url = f"{front.listening().url}/v1"
        with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
            messages = [{"role": "user", "content": "What is a pendulum?"}]
            wish = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
            whole = client.chat.completions.create(**wish)
            with client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}) as stream:
                pieces = list(stream)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
            assert text == whole.choices[0].message.content != ""
            assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
            assert whole.usage.prompt_tokens_details.cached_tokens > 0
            with pytest.raises(openai.BadRequestError) as told:
                client.chat.completions.create(**wish, metadata={"kv_from": "h:1"})
            assert told.value.param == "metadata.kv_from"
        wrong = openai.OpenAI(base_url=url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
    finally:
        front.close()
