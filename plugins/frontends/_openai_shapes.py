"""The shapes of answers, for ``/openapi.json``. They are built elsewhere; tests hold the two together."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ErrorWords(TypedDict):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Any answer that is none."""

    error: ErrorWords


class CachedTokens(TypedDict):
    """Of a prompt."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class RankedLogprob(TypedDict):
    """vLLM's."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(TypedDict):
    """Four lists of the same length."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    finish_detail: NotRequired[str]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]


class CompletionAnswer(TypedDict):
    """Of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class RivalLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(RivalLogprob):
    """The same, with its likeliest rivals."""

    top_logprobs: list[RivalLogprob]


class ChatLogprobs(TypedDict):
    """Of a message."""

    content: list[TokenLogprob]
    refusal: None


class WrittenFunction(TypedDict):
    """A function, with arguments as text."""

    name: str
    arguments: str


class WrittenCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: WrittenFunction


class AnsweredMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[WrittenCall]]


class ChatChoice(TypedDict):
    """One message."""

    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    finish_detail: NotRequired[str]


class ChatAnswer(TypedDict):
    """Of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]


class ResponseUsage(TypedDict):
    """Token counts, by the names that they have there."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(TypedDict):
    """Of ``/v1/responses``; and what of the request it repeats."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    error: None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage


class RenderedPrompt(TypedDict):
    """One prompt as it is computed."""

    prompt: str | None
    prompt_token_ids: list[int]
    count: int
    max_tokens: int


class RenderedAnswer(TypedDict):
    """Of the two that render."""

    object: Literal["rendered_prompts"]
    max_model_len: int
    data: list[RenderedPrompt]


class EmbeddingItem(TypedDict):
    """Of one input: numbers, or their base64 text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingsAnswer(TypedDict):
    """Of ``/v1/embeddings``."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class TokenizeAnswer(TypedDict):
    """Of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    """Of ``/detokenize``."""

    prompt: str


class ModelCard(TypedDict):
    """The served model and what it may be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kv_pool_tokens: int


class ModelsAnswer(TypedDict):
    """Of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class LiveAnswer(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class HealthAnswer(TypedDict):
    """How the server is."""

    status: Literal["ok", "starting", "stalled", "draining", "dead"]
    state: Literal["starting", "ready", "draining", "stopped"]
    ready: bool
    cause: str | None
    open_requests: int
    stalled_for: float


class EngineAnswer(TypedDict):
    """What the engine is."""

    object: Literal["engine"]
    version: str
    incarnation: str
    state: Literal["ready", "draining", "stopped"]
    role: Literal["both", "prefill", "decode"]
    model: str
    fingerprint: str
    page_size: int
    num_pages: int
    vocab_size: int
    max_model_len: int
    connectors: dict[str, Any]
    health: HealthAnswer


class VersionAnswer(TypedDict):
    """Of ``/version``."""

    version: str
