"""What clients may send. Strict: a field that would be ignored is refused by name, unless its value changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.core.errors import InvalidRequest, suggest
from engine.core.request import SamplingParams

MAX_N = 1024


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


def _number(expected: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == expected


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _text(value: Any) -> bool:
    return isinstance(value, str)


# Fields of the OpenAI interface (and of its usual extensions) that this server does not act on, with the values at
# which ignoring them is right. ``None`` always is.
HARMLESS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "audio": (_empty, "nothing"),
    "best_of": (_number(1), "1"),
    "echo": (_one_of(False), "false"),
    "frequency_penalty": (_number(0), "0"),
    "function_call": (_one_of("none", "auto"), '"none"'),
    "functions": (_empty, "[]"),
    "include_stop_str_in_output": (_one_of(False), "false"),
    "logit_bias": (_empty, "{}"),
    "logprobs": (_one_of(False), "false (log-probabilities are not available yet)"),
    "min_p": (_number(0), "0"),
    "modalities": (lambda value: value == ["text"], '["text"]'),
    "parallel_tool_calls": (_one_of(True, False), "true or false"),
    "prediction": (_empty, "nothing"),
    "presence_penalty": (_number(0), "0"),
    "prompt_logprobs": (_empty, "nothing (log-probabilities are not available yet)"),
    "repetition_penalty": (_number(1), "1"),
    "response_format": (lambda value: value == {"type": "text"}, '{"type": "text"}'),
    "safety_identifier": (_text, "a string"),
    "service_tier": (_one_of("auto", "default"), '"auto" or "default"'),
    "skip_special_tokens": (_one_of(True), "true"),
    "store": (_one_of(False), "false"),
    "suffix": (_empty, '""'),
    "tool_choice": (_one_of("none", "auto"), '"none"'),
    "tools": (_empty, "[]"),
    "top_logprobs": (_number(0), "0 (log-probabilities are not available yet)"),
}


class Strict(BaseModel):
    """No coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """``include_usage``: a last chunk with the usage. ``include_obfuscation`` must be off."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(Strict):
    """Fields that both endpoints share. ``None`` is the same as leaving a field out."""

    model: str | None = Field(None, description="must be the served model; may be left out")
    stream: bool | None = Field(None, description="server-sent events instead of one answer")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="choices per prompt", ge=1, le=MAX_N)
    max_tokens: int | None = Field(
        None, description="most tokens to generate (default: what the model's length leaves)"
    )
    temperature: float | None = Field(None, description="0 is greedy (default 1)")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is off")
    seed: int | None = Field(None, description="choice k of a prompt uses seed + k")
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = Field(None, description="smaller is more urgent, for schedulers that look at it")
    cache_salt: str | None = Field(None, description="separates this prompt's cached prefix from those of other salts")
    user: str | None = Field(None, description="handed to policies as metadata")
    metadata: dict[str, str] | None = Field(None, description="handed to policies")
    prompt_cache_key: str | None = Field(
        None, description="names a conversation: a cache with sessions keeps its prefix for the next turn"
    )

    def sampling(self, max_tokens: int | None, choice: int) -> SamplingParams:
        """Parameters of one choice. Choice k draws from seed + k, so that choices differ and can be repeated."""
        seed = self.seed
        if seed is not None and choice:  # choice 0 keeps a seed that is out of range, for the validator to refuse
            seed = (seed + choice + 2**63) % 2**64 - 2**63
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None or self.top_k == -1 else self.top_k,
            seed=seed,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
        )

    def tags(self) -> dict[str, Any]:
        """What policies may read of the request."""
        named = {"user": self.user, "session": self.prompt_cache_key}
        return {**(self.metadata or {}), **{key: value for key, value in named.items() if value is not None}}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def length(self) -> int | None:
        """Most tokens to generate; ``None`` is all the room there is."""
        return self.max_tokens

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A request from its JSON text. Raises ``InvalidRequest`` naming the field, also where it is not supported."""
        try:
            request = cls.model_validate(_supported(cls, _read_json(body)))
        except ValidationError as error:
            raise _explain(error) from error
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options", "is only allowed when stream is true")
        return request


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: Any = Field(description="text, a list of texts, token ids, or a list of lists of token ids")

    def prompts(self) -> list[str | list[int]]:
        """The prompt in any of its four shapes, as a list. Raises ``InvalidRequest``."""
        value = self.prompt
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise InvalidRequest(
                "prompt", "must be a string, a list of strings, token ids, or a list of token id lists"
            )
        if not value:
            raise InvalidRequest("prompt", "is empty: at least one token is needed")
        if all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value):
            return value
        if any(isinstance(item, str | list) for item in value):
            raise InvalidRequest("prompt", "mixes strings, token ids and lists: use one shape")
        return [value]


class Part(Strict):
    """A piece of a message's content. Only text is understood."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation. Fields that an answer of ours carries may come back, empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    name: str | None = Field(None, description="accepted and not used: chat templates know no names")
    refusal: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None

    def plain(self) -> dict[str, str]:
        """The message as chat templates want it. Raises ``InvalidRequest`` where there is no content."""
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":
            raise InvalidRequest("messages", f"a message of role {self.role} needs content")
        content = self.content or ""
        return {"role": role, "content": content if isinstance(content, str) else "".join(p.text for p in content)}


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(description="the conversation so far", min_length=1)
    max_completion_tokens: int | None = Field(None, description="the newer name of max_tokens")
    reasoning_effort: Literal["none"] | None = None

    def length(self) -> int | None:
        """``max_tokens`` under either of its names. Raises ``InvalidRequest`` where they differ."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest("max_completion_tokens", f"is {new}, but max_tokens is {old}: give one of them")
        return new if new is not None else old


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(body)  # strict: no NaN, no trailing text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("body", f"must be a JSON object, not {type(data).__name__}")
    return data


def _supported(cls: type[Sampling], data: dict[str, Any]) -> dict[str, Any]:
    """The fields to act on. Raises ``InvalidRequest`` for the first that could only be ignored."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in cls.model_fields:
            kept[name] = value
        elif name not in HARMLESS:
            raise InvalidRequest(name, f"unknown field; {suggest(name, [*cls.model_fields, *HARMLESS])}")
        elif value is not None and not HARMLESS[name][0](value):
            raise InvalidRequest(name, f"is not supported: the only accepted value is {HARMLESS[name][1]}")
    return kept


def _explain(error: ValidationError) -> InvalidRequest:
    """The first fault in words, at the place that the client wrote."""
    faults = error.errors(include_url=False)
    # Of a union's faults (one for each branch) the deepest is that of the branch which was meant.
    fault = max((f for f in faults if f["loc"][:1] == faults[0]["loc"][:1]), key=lambda f: len(f["loc"]))
    where = _dotted(fault["loc"])
    if fault["type"] == "missing":
        return InvalidRequest(where, "is required")
    shown = repr(fault["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(where, f"{fault['msg'][0].lower()}{fault['msg'][1:]}, got {shown}")


def _dotted(where: tuple[int | str, ...]) -> str:
    """``messages[0].content``. Union branches (``str``, ``list[Part]``), which clients do not know, are left out."""
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "str" and "[" not in part:
            text += f".{part}" if text else part
    return text
