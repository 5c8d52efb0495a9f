"""What clients may send to the endpoints that generate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from engine.core.checks import MAX_SALT
from engine.core.errors import InvalidRequest
from engine.core.grammar import Grammar
from engine.core.sampling import SamplingParams
from engine.core.validate import MAX_SECONDS
from engine.plugins.frontends._bounds import InParts, InSlices, Most, Off
from engine.plugins.frontends._openai_fields import MOST_TEXT, NO_BOUNDS, UNSUPPORTED, Body, Strict
from engine.plugins.frontends._openai_formats import ResponseFormat, StructuredOutputs, grammar_of
from engine.plugins.frontends._openai_tools import Choice, MadeCall, NamedTool, ToolDefinition, Toolset, toolset_of

TOKEN_ID = re.compile(r"-?\d{1,20}")


class StreamOptions(Strict):
    """``include_usage``: a last chunk with the usage. ``include_obfuscation`` must be off."""

    include_usage: bool | None = None
    include_obfuscation: Off | None = None


class CacheOptions(Strict):
    """How a request uses the prefix cache, here and behind the connectors."""

    read: bool | None = Field(None, description="its prefix may come from the cache (default true)")
    write: bool | None = Field(None, description="others may find what it computes (default true)")
    salt: str | None = Field(
        None, description="separates its cached content from that of other salts", max_length=MAX_SALT
    )
    ttl: float | None = Field(
        None,
        description="seconds that others may find it for (default: until its memory is needed)",
        gt=0,
        le=MAX_SECONDS,
    )


class Asked(Body):
    """Fields of all that is computed. ``None`` is the same as leaving a field out."""

    model: str | None = Field(None, description="must be the served model; may be left out")
    priority: int | None = Field(None, description="smaller is more urgent, for schedulers that look at it")
    deadline_ms: int | None = Field(None, description="milliseconds after which it ends, with an error", ge=1)
    cache: CacheOptions | None = None
    cache_salt: str | None = Field(None, description="the same as cache.salt", max_length=MAX_SALT)
    user: str | None = Field(None, description="handed to policies as metadata", max_length=MOST_TEXT)
    metadata: Annotated[dict[str, str], InParts] | None = Field(None, description="handed to policies")

    def salt(self) -> str:
        """The cache salt under either of its names. Raises ``InvalidRequest`` where they differ."""
        new = self.cache.salt if self.cache is not None else None
        if new is not None and self.cache_salt is not None and new != self.cache_salt:
            raise InvalidRequest("cache_salt", "differs from cache.salt: give one of them")
        return new or self.cache_salt or ""

    def cache_ttl(self) -> float | None:
        """Seconds that others may find what it writes. Raises ``InvalidRequest`` where it writes nothing."""
        if self.cache is None or self.cache.ttl is None:
            return None
        if self.cache.write is False:
            raise InvalidRequest("cache.ttl", "is for what others find, and with cache.write false they find nothing")
        return self.cache.ttl

    def tags(self) -> dict[str, Any]:
        """What policies may read of the request."""
        return {**(self.metadata or {}), **({} if self.user is None else {"user": self.user})}

    def asking(self) -> dict[str, Any]:
        """Fields of ``Ask`` that say so. Raises ``InvalidRequest``."""
        cache = self.cache
        return {
            "priority": self.priority or 0,
            "salt": self.salt(),
            "metadata": self.tags(),
            "read_cache": cache is None or cache.read is not False,
            "write_cache": cache is None or cache.write is not False,
            "cache_ttl": self.cache_ttl(),
            "deadline": None if self.deadline_ms is None else self.deadline_ms / 1000,
        }


class Sampling(Asked):
    """Fields that both endpoints which generate share."""

    stream: bool | None = Field(None, description="server-sent events instead of one answer")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="choices per prompt")
    max_tokens: int | None = Field(
        None, description="most tokens to generate (default: what the model's length leaves)"
    )
    temperature: float | None = Field(None, description="0 is greedy (default 1)")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is off")
    min_p: float | None = Field(None, description="least probability, as a part of the likeliest token's")
    repetition_penalty: float | None = Field(None, description="1 is off")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], InParts] | None = Field(
        None, description="token id -> what is added to its logit"
    )
    seed: int | None = Field(None, description="choice k depends on seed and k")
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = Field(None, description="what ended the text is part of it")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = Field(None, description="marks are left out of the text (default true)")
    response_format: ResponseFormat | None = Field(None, description="what the answer must be")
    structured_outputs: StructuredOutputs | None = Field(None, description="the same, by vLLM's names")
    prompt_logprobs: int | None = Field(None, description="log-probabilities of the prompt's tokens, so many rivals")
    prompt_cache_key: str | None = Field(
        None, description="names a conversation: a cache with sessions keeps its prefix for the next turn",
        max_length=MOST_TEXT,
    )  # fmt: skip

    def sampling(self) -> SamplingParams:
        """Parameters of the prompt's choices. Raises ``InvalidRequest`` where fields contradict each other."""
        same = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
                "n", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens")  # fmt: skip
        return SamplingParams(
            max_tokens=self.length(),
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            logit_bias=self.biases(),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.rivals(),
            prompt_logprobs=self.prompt_rivals(),
            grammar=self.grammar(),
            **{name: value for name in same if (value := getattr(self, name)) is not None},
        )

    def grammar(self) -> Grammar | None:
        """What the answer must be. Raises ``InvalidRequest`` where it is said twice."""
        return grammar_of(self.response_format, self.structured_outputs)

    def toolset(self) -> Toolset | None:
        """The tools that may be called: none."""
        return None

    def biases(self) -> dict[int, float]:
        """``logit_bias`` by token id. Raises ``InvalidRequest`` for a key that is no integer."""
        for name in self.logit_bias or ():
            if not TOKEN_ID.fullmatch(name):
                raise InvalidRequest("logit_bias", f"keys are token ids, got {name[:40]!r}")
        return {int(name): value for name, value in (self.logit_bias or {}).items()}

    def rivals(self) -> int | None:
        """How many rivals of each token are reported; ``None``: no log-probabilities at all."""
        raise NotImplementedError

    def prompt_rivals(self) -> int | None:
        """The same of the prompt's tokens."""
        return self.prompt_logprobs

    def tags(self) -> dict[str, Any]:
        """What policies may read of the request."""
        session = self.prompt_cache_key
        return {**super().tags(), **({} if session is None else {"session": session})}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def length(self) -> int | None:
        """Most tokens to generate; ``None`` is all the room there is."""
        return self.max_tokens

    @classmethod
    def parse(cls, body: bytes, most: Mapping[str, Most] = NO_BOUNDS) -> Self:
        """A request from its JSON text. Raises ``InvalidRequest`` naming the field, also where it is not supported."""
        request = super().parse(body, most)
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options", "is only allowed when stream is true")
        if request.stream and request.prompt_logprobs is not None:
            words = "is not available when stream is true: ask for echo and logprobs, or for the whole answer"
            raise InvalidRequest("prompt_logprobs", words, code=UNSUPPORTED)
        return request


def in_one_shape(field: str, value: Any) -> list[str | list[int]]:
    """A text, a list of texts, token ids, or a list of lists of them, as a list. Raises ``InvalidRequest``."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(field, "must be a string, a list of strings, token ids, or a list of token id lists")
    if not value:
        raise InvalidRequest(field, "is empty: at least one token is needed")
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
        return value
    if any(isinstance(item, str | list) for item in value):
        raise InvalidRequest(field, "mixes strings, token ids and lists: use one shape")
    return [value]


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: Any = Field(description="text, a list of texts, token ids, or a list of lists of token ids")
    logprobs: int | None = Field(None, description="log-probabilities of the tokens, with so many rivals each")
    echo: bool | None = Field(None, description="the answer begins with the prompt; max_tokens may then be 0")

    def length(self) -> int | None:
        """As given; a prompt that is only to be looked at (``scores_only``) computes one token."""
        return 1 if self.scores_only else self.max_tokens

    @property
    def scores_only(self) -> bool:
        """Nothing is to be generated: the prompt comes back, with its log-probabilities if they are asked for."""
        return bool(self.echo) and self.max_tokens == 0

    def rivals(self) -> int | None:
        """``logprobs`` as given."""
        return self.logprobs

    def prompt_rivals(self) -> int | None:
        """Echoed tokens have log-probabilities like the others."""
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            return self.logprobs
        return self.prompt_logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompt in any of its four shapes, as a list. Raises ``InvalidRequest``."""
        return in_one_shape("prompt", self.prompt)


class Part(Strict):
    """A piece of a message's content. Only text is understood."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation. Fields that an answer of ours carries may come back, empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], InSlices] | None = None
    name: str | None = Field(None, description="accepted and not used: chat templates know no names")
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[MadeCall], InSlices] | None = Field(None, description="calls of an earlier answer")
    tool_call_id: str | None = Field(None, description="of the call that a message of role tool answers")

    def plain(self) -> dict[str, Any]:
        """The message as chat templates want it. Raises ``InvalidRequest`` where there is no content."""
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":
            raise InvalidRequest("messages", f"a message of role {self.role} needs content")
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(p.text for p in content)
        plain: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls and role == "assistant":
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        elif self.tool_calls:
            raise InvalidRequest("messages", f"a message of role {self.role} has no tool_calls")
        if (self.tool_call_id is None) == (role == "tool"):
            words = "needs" if role == "tool" else "has no"
            raise InvalidRequest("messages", f"a message of role {self.role} {words} tool_call_id")
        if role == "tool":
            plain["tool_call_id"] = self.tool_call_id
        return plain


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], InSlices] = Field(description="the conversation so far", min_length=1)
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="report the log-probability of each token")
    top_logprobs: int | None = Field(None, description="… and those of so many rivals")
    reasoning_effort: Literal["none"] | None = None
    tools: Annotated[list[ToolDefinition], InSlices] | None = Field(
        None, description="functions that the model may call"
    )
    tool_choice: Choice | None = Field(None, description="none, auto (the default), required, or one of the tools")
    parallel_tool_calls: bool | None = Field(None, description="several calls in one answer (default true)")

    def toolset(self) -> Toolset | None:
        """The tools that may be called. Raises ``InvalidRequest``."""
        choice = self.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        tools = [definition.function.tool() for definition in self.tools or ()]
        word = None if isinstance(choice, NamedTool) else choice
        return toolset_of(tools, word, named, self.parallel_tool_calls is not False)

    def length(self) -> int | None:
        """``max_tokens`` under either of its names. Raises ``InvalidRequest`` where they differ."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("max_completion_tokens", f"is {new}, but max_tokens is {old}: give one of them")
        return new if new is not None else old

    def rivals(self) -> int | None:
        """``top_logprobs`` where ``logprobs`` is set. Raises ``InvalidRequest`` where it is not."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs", "is only allowed when logprobs is true")
            return None
        return self.top_logprobs or 0
