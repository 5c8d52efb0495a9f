"""Any OpenAI-compatible server as a target: found out about, asked in streams, its failures told apart.

Token ids go to ``/v1/completions``, made-up words to ``/v1/chat/completions``. A gap between tokens is one between
events of a stream, as vLLM's load client counts them; how many tokens there were is what the server's usage says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from engine.core.errors import ConfigError, EngineError
from engine.lab.arrivals import Arrival, Workload
from engine.lab.driving import Answer, Target
from engine.lab.events import AnswerStream, events_of, short, words_of
from engine.lab.inside import made_up
from engine.lab.measured import GOOD
from engine.lab.wording import worded

OURS = "sixhooks"
IGNORES_EOS = (OURS, "vllm", "sglang", "llamacpp")  # who takes ignore_eos, by owned_by of their models
REFUSED = (429, 503)
ASK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server, and how it is asked.

    Attributes:
        base: e.g. ``http://127.0.0.1:8000``, without ``/v1``.
        model: what it calls its model.
        owner: who it says it is: ``sixhooks``, ``vllm``, …
        vocab: prompts are token ids below this; unused with ``chat``.
        chat: prompts are made-up words, turns are messages.
        timeout: seconds from when a request is due after which it is given up.
        extra: fields of each body, over all others; ``None`` takes a field away.
        tokenizer: gives token ids of a text; ``None``: the server is asked (``tokenizes``).
    """

    base: str
    model: str
    owner: str = ""
    vocab: int = 0
    chat: bool = False
    timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = field(default=None, repr=False)
    tokenizes: bool = False

    @classmethod
    def find(
        cls, url: str, *, api_key: str | None = None, model: str | None = None, vocab: int | None = None,
        tokenizer: Any = None, chat: bool = False, **more: Any,
    ) -> Self:  # fmt: skip
        """Ask a server who it is.

        Args:
            url: with or without ``/v1`` at its end.
            model: its name, where it serves several.
            vocab: token ids are below this; default: what the tokenizer has, or what the server tells.
            more: other fields.

        Raises:
            EngineError: it does not answer. ConfigError: it has no such model, or nobody knows its vocabulary.
        """
        base = _base(url)
        with httpx.Client(headers=_headers(api_key), timeout=ASK_SECONDS) as client:
            cards = _get(client, f"{base}/v1/models", base).get("data") or []
            card = next((one for one in cards if model in (None, one.get("id"))), None)
            if card is None:
                known = ", ".join(repr(one.get("id")) for one in cards) or "none"
                raise ConfigError(f"{base} serves no model {model or ''!r}; it has {known}")
            owner = str(card.get("owned_by", ""))
            if vocab is None and tokenizer is not None:
                vocab = int(tokenizer.vocab_size)
            if vocab is None and owner == OURS:
                vocab = _get(client, f"{base}/v1/engine", base).get("vocab_size")
            if vocab is None and not chat:
                words = "give --vocab-size or --tokenizer, or ask with --chat"
                raise ConfigError(f"nobody knows which token ids {card['id']!r} has: {words}")
            tokenizes = not chat and tokenizer is None and _tokenizes(client, base, card["id"])
        return cls(
            base=base, model=card["id"], owner=owner, vocab=vocab or 0, chat=chat, api_key=api_key,
            tokenizer=tokenizer, tokenizes=tokenizes, **more,
        )  # fmt: skip

    def check(self, workload: Workload) -> None:
        """Raise ``ConfigError`` where the workload has what cannot be asked of it."""
        if not self.chat and self.tokenizer is None and not self.tokenizes:
            for one in workload:
                if one.continues:
                    raise ConfigError(
                        f"request {one.id!r} continues an answer, whose token ids nobody tells: give --tokenizer, or "
                        "ask with --chat"
                    )

    def describe(self) -> dict[str, Any]:
        """As plain values, without the key."""
        names = ("base", "model", "owner", "vocab", "chat", "timeout", "extra")
        return {name: getattr(self, name) for name in names}

    def body(self, arrival: Arrival, prompt: Any) -> dict[str, Any]:
        """What is sent."""
        longest = "max_completion_tokens" if self.chat else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model, "messages" if self.chat else "prompt": prompt, longest: arrival.output,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self.owner in IGNORES_EOS:
            body["ignore_eos"] = True
        if arrival.priority:
            body["priority"] = arrival.priority
        if self.owner == OURS:
            body["metadata"] = arrival.metadata
            if arrival.deadline is not None:
                body["deadline_ms"] = max(1, round(arrival.deadline * 1e3))
        return {name: value for name, value in {**body, **self.extra}.items() if value is not None}


class EndpointTarget(Target):
    """Asks it. A context manager, to be used in one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        path = "chat/completions" if endpoint.chat else "completions"
        self._url = f"{endpoint.base}/v1/{path}"
        self._client: httpx.AsyncClient

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        headers = {**_headers(self._endpoint.api_key), "Content-Type": "application/json"}
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def prepare(self, arrival: Arrival, said: Any) -> tuple[Any, bytes]:
        """The prompt, and the whole body."""
        prompt: Any
        if self._endpoint.chat:
            prompt = [*(said or ()), {"role": "user", "content": worded(arrival.prompt)}]
        else:
            prompt = made_up(arrival, said or (), self._endpoint.vocab)
        return prompt, json.dumps(self._endpoint.body(arrival, prompt)).encode()

    async def ask(self, arrival: Arrival, prepared: tuple[Any, bytes], keep: bool) -> Answer:
        """Read its stream to the end. Whatever goes wrong is an answer that is not good."""
        prompt, body = prepared
        answer = Answer(prompt=0 if self._endpoint.chat else len(prompt), finish="cut")
        stream = AnswerStream(answer, self._endpoint.chat)
        try:
            async with asyncio.timeout(self._patience(arrival)):
                await self._read(body, answer, stream)
        except TimeoutError:
            answer.finish = "timeout"
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            answer.finish, answer.detail = "unreachable", short(error)
        except (httpx.HTTPError, httpx.StreamError, ValueError) as error:
            answer.finish, answer.detail = "cut", short(error)
        answer.ended = time.perf_counter()
        stream.end()
        if keep and answer.finish in GOOD:
            try:
                answer.said = await self._said(prompt, "".join(stream.text))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                answer.finish, answer.detail = "error", f"no token ids of its answer: {short(error)}"
        return answer

    def _patience(self, arrival: Arrival) -> float:
        """A server that is not ours knows of no deadline: the client leaves."""
        told = self._endpoint.owner == OURS or arrival.deadline is None
        return self._endpoint.timeout if told else min(self._endpoint.timeout, arrival.deadline or 0.0)

    async def _read(self, body: bytes, answer: Answer, stream: AnswerStream) -> None:
        async with self._client.stream("POST", self._url, content=body) as response:
            if response.status_code != httpx.codes.OK:
                words = words_of(await response.aread())
                known = response.status_code in REFUSED
                answer.finish = "refused" if known else f"http-{response.status_code}"
                answer.detail = f"{response.status_code}: {words}"
                return
            async for event in events_of(response):
                stream.take(event)
                if stream.over:
                    return

    async def _said(self, prompt: Any, text: str) -> Any:
        """What a request that continues this one begins with."""
        endpoint = self._endpoint
        if endpoint.chat:
            return [*prompt, {"role": "assistant", "content": text}]
        if endpoint.tokenizer is not None:
            return [*prompt, *endpoint.tokenizer.encode(text, add_special=False)]
        body = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
        answer = await self._client.post(f"{endpoint.base}/tokenize", json=body, timeout=endpoint.timeout)
        return [*prompt, *answer.raise_for_status().json()["tokens"]]


def _base(url: str) -> str:
    full = url if "//" in url else f"http://{url}"
    try:
        parts = httpx.URL(full)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no URL of a server: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
    return full.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _get(client: httpx.Client, url: str, base: str) -> dict[str, Any]:
    try:
        answer = client.get(url)
    except httpx.HTTPError as error:
        raise EngineError(f"no server answers at {base}: {short(error)}") from error
    if answer.status_code != httpx.codes.OK:
        raise EngineError(f"{url} answered {answer.status_code}: {words_of(answer.content)}")
    try:
        found = answer.json()
    except ValueError as error:
        raise EngineError(f"{url} answered with no JSON") from error
    return found if isinstance(found, dict) else {}


def _tokenizes(client: httpx.Client, base: str, model: str) -> bool:
    """Whether it has ``/tokenize``, as ours and vLLM's."""
    try:
        answer = client.post(f"{base}/tokenize", json={"model": model, "prompt": "a"})
        return answer.status_code == httpx.codes.OK and isinstance(answer.json().get("tokens"), list)
    except (httpx.HTTPError, ValueError, AttributeError):
        return False
