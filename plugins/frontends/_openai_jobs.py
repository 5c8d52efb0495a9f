"""From a body to requests that are ready to be submitted: read, render, tokenise, check. Touches nothing shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import InvalidRequest
from engine.core.protocols import ToolParser
from engine.core.sampling import SamplingParams
from engine.core.serve.asks import Ask
from engine.core.serve.client import AsyncEngine
from engine.core.serve.text import encode
from engine.core.tools import rendered
from engine.plugins.frontends._openai_answers import Wish
from engine.plugins.frontends._openai_embeddings import EmbeddingRequest, told_of_input
from engine.plugins.frontends._openai_logprobs import Echo
from engine.plugins.frontends._openai_most import most_of, of_inputs
from engine.plugins.frontends._openai_responses import ResponsesRequest, renamed
from engine.plugins.frontends._openai_schema import ChatRequest, CompletionRequest, Sampling
from engine.plugins.frontends._openai_tools import Toolset, check_beside

MANY_SEQUENCES, MANY_TOKENS = 64, 2**16  # to submit them takes some milliseconds


@dataclass(frozen=True)
class Job:
    """A checked request. ``texts`` are its prompts as text, where they have one."""

    asks: list[Ask]
    texts: list[str | None]
    stream: bool
    wish: Wish

    @property
    def settles_late(self) -> bool:
        """Whether it may turn out to be invalid after it was accepted: grammars are compiled by the engine."""
        return self.wish.params.grammar is not None

    @property
    def much(self) -> bool:
        """Whether to submit it takes a while."""
        sequences = sum(ask.params.n for ask in self.asks)
        return sequences > MANY_SEQUENCES or sum(ask.params.n * len(ask.tokens) for ask in self.asks) > MANY_TOKENS

    def of(self, tenant: str | None, note: str) -> Job:
        """The same, asked by a tenant, with a note: see ``Ask``."""
        if tenant is None and not note:
            return self
        return replace(self, asks=[replace(ask, tenant=tenant, note=note) for ask in self.asks])


class Preparer:
    """Prepares the requests of one server. Its methods may run in any thread.

    Args:
        name: the served model's name, for messages.
        check_model: raises where a client asks for another model.
        parser: how the model writes calls of tools.

    Attributes:
        most: how much each field of a body may hold.
    """

    def __init__(self, engine: AsyncEngine, name: str, check_model: Callable[[str], None], parser: ToolParser) -> None:
        self._engine, self._name, self._check_model, self.parser = engine, name, check_model, parser
        self.most = most_of(engine.limits)

    def prepare(self, body: bytes, schema: type[Sampling], request_id: str) -> Job:
        """Parse, tokenise and check a body. Raises ``InvalidRequest`` naming the field."""
        return self._ready(schema.parse(body, self.most), request_id)

    def prepare_response(self, body: bytes, request_id: str) -> tuple[ResponsesRequest, Job]:
        """The same of a body of ``/v1/responses``. Raises ``InvalidRequest`` at the field that it has there."""
        asked = ResponsesRequest.parse(body, self.most)
        try:
            return asked, self._ready(asked.chat(), request_id)
        except InvalidRequest as error:
            raise renamed(error) from error

    def prepare_embeddings(self, body: bytes, request_id: str) -> tuple[EmbeddingRequest, Job]:
        """The same of a body of ``/v1/embeddings``. Raises ``InvalidRequest`` naming the field."""
        wish = EmbeddingRequest.parse(body, of_inputs(self.most))
        if wish.model is not None:
            self._check_model(wish.model)
        inputs, most = wish.inputs(), self._engine.limits.max_open
        if len(inputs) > most:
            words = f"has {len(inputs)} texts: at most {most} can be open"
            raise InvalidRequest("input", words, code="above_limit")
        with told_of_input():
            asks, texts = self._asks(inputs, request_id=request_id, pooling=wish.pools(), **wish.asking())
        wish.check_dimensions(self._engine.model.hidden_size)
        return wish, Job(asks, texts, stream=False, wish=Wish(params=SamplingParams()))

    def _ready(self, wish: Sampling, request_id: str) -> Job:
        if wish.model is not None:
            self._check_model(wish.model)
        toolset = wish.toolset()
        prompts = self._prompts(wish, toolset)
        params = self._params(wish, toolset)
        self._check_size(len(prompts), params.n)
        asks, texts = self._asks(prompts, request_id=request_id, params=params, **wish.asking())
        return Job(asks, texts, bool(wish.stream), self._wish(wish, toolset, asks, texts))

    def _asks(self, prompts: Sequence[str | list[int]], **fields: Any) -> tuple[list[Ask], list[str | None]]:
        """One for each prompt, checked; and the prompts that are text. Raises ``InvalidRequest`` saying which it is."""
        asks: list[Ask] = []
        for number, prompt in enumerate(prompts):
            try:
                ask = Ask(tokens=self._tokens(prompt), **fields)
                ask.check(self._engine.limits)
            except InvalidRequest as error:
                if len(prompts) == 1:
                    raise
                words = f"(prompt {number} of {len(prompts)}) {error.message}"
                raise InvalidRequest(error.field, words, code=error.code) from error
            asks.append(ask)
        return asks, [prompt if isinstance(prompt, str) else None for prompt in prompts]

    def _params(self, wish: Sampling, toolset: Toolset | None) -> SamplingParams:
        """Parameters of the choices; where tools may be called, those that calls need."""
        params = wish.sampling()
        check_beside(toolset, params.grammar)
        if toolset is None:
            return params
        tokenizer = self._engine.tokenizer
        if tokenizer is not None and any(map(tokenizer.is_special, self.parser.marks)):
            params = replace(params, skip_special_tokens=False)
        return replace(params, grammar=toolset.grammar(self.parser))

    def _prompts(self, wish: Sampling, toolset: Toolset | None) -> list[str | list[int]]:
        """The prompts of a request: text, or token ids. Raises ``InvalidRequest``."""
        if isinstance(wish, CompletionRequest):
            return wish.prompts()
        assert isinstance(wish, ChatRequest)
        if self._engine.tokenizer is None:
            raise InvalidRequest("messages", f"model {self._name!r} has no chat template")
        tools = () if toolset is None else toolset.tools
        return [rendered(self._engine.tokenizer, self.parser, [one.plain() for one in wish.messages], tools)]

    def _tokens(self, prompt: str | list[int]) -> Sequence[int]:
        return encode(self._engine.tokenizer, prompt, self._engine.limits) if isinstance(prompt, str) else prompt

    def _check_size(self, prompts: int, n: int) -> None:
        """Before anything is tokenised: whether so many sequences could ever be open."""
        limits = self._engine.limits
        if n > limits.max_n:
            raise InvalidRequest("n", f"is {n}, must be between 1 and {limits.max_n}", code="above_limit")
        if prompts * n > limits.max_open:
            words = f"{prompts} prompts x n {n}: at most {limits.max_open} sequences can be open"
            raise InvalidRequest("n" if prompts == 1 else "prompt", words, code="above_limit")

    def _wish(self, wish: Sampling, toolset: Toolset | None, asks: Sequence[Ask], texts: Sequence[str | None]) -> Wish:
        echo: tuple[Echo, ...] | None = None
        if isinstance(wish, CompletionRequest) and wish.echo:
            echo = tuple(
                Echo(self._text(ask.tokens) if text is None else text, tuple(ask.tokens))
                for ask, text in zip(asks, texts, strict=True)
            )
        return Wish(
            params=asks[0].params,
            with_usage=wish.wants_usage,
            echo=echo,
            scores_only=isinstance(wish, CompletionRequest) and wish.scores_only,
            prompt_logprobs=wish.prompt_logprobs is not None,
            toolset=toolset,
            parser=self.parser,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        tokenizer = self._engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special=False)
