"""``sim``: no model, no torch. Tokens are a deterministic function of the sequence, time is a cost model.

There is no distribution: what shapes one (temperature, penalties, …) is accepted and changes nothing. What a grammar
does not allow is never said. Log-probabilities are as made up as the tokens, of the right number and order; so are
embeddings.

Used to try schedulers and servers without a model, and to measure the engine's own overhead. The clock can be real
(``step_ms`` and ``us_per_token`` are slept) or left out (both 0).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from hashlib import shake_128
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from engine.core.continuation import Continuations, Row, certain
from engine.core.errors import ModelError
from engine.core.grammar import GrammarError, unpacked
from engine.core.memory import KVLayout, layout_digest
from engine.core.plan import Outcome, Plan
from engine.core.pooling import POOLING, Vector
from engine.core.protocols import Executor, ModelInfo, PluginOptions
from engine.core.request import Request
from engine.core.sampling import SAMPLING, TokenLogprobs

Made = dict[int, Sequence[TokenLogprobs]]


class SimExecutor(Executor):
    """Emits pseudo-random tokens: each depends on the prompt, the seed and the position, never on the batch."""

    name = "sim"
    overlaps = True
    sampling = SAMPLING
    pooling = POOLING

    class Options(PluginOptions):
        vocab_size: int = Field(49152, ge=2, description="token ids are below this")
        max_model_len: int = Field(8192, ge=2, description="most tokens of one request")
        hidden_size: int = Field(32, ge=0, description="numbers of an embedding (0: there are none)")
        eos_id: int | None = Field(None, description="token that ends a request (default: none ever does)")
        step_ms: float = Field(0.0, ge=0, description="time a step takes, whatever it computes")
        us_per_token: float = Field(0.0, ge=0, description="time each computed token adds")
        pages: int = Field(4096, ge=1, description="pages in the pool when num_pages is not given")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._continuations = Continuations()
        self._weights: dict[str, Any] = {}
        self._twist = 0

    def load(self) -> ModelInfo:
        """No files; returns at once."""
        options = self.options
        eos = frozenset() if options.eos_id is None else frozenset({options.eos_id})
        return ModelInfo(
            name="sim",
            vocab_size=options.vocab_size,
            max_model_len=options.max_model_len,
            eos_ids=eos,
            hidden_size=options.hidden_size,
            fingerprint=f"sim-{options.vocab_size}",
            details={"computes": "nothing: tokens are pseudo-random"},
        )

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""
        self._page_size = page_size

    def kv_layout(self) -> KVLayout:
        """No bytes: connectors move keys only, and a hit is a hit."""
        return KVLayout((), layout_digest(executor=self.name, page_size=self._page_size))

    def default_pages(self, page_size: int) -> int | None:
        """As configured."""
        pages: int = self.options.pages
        return pages

    def weights(self) -> dict[str, Any]:
        """What ``update_weights`` was given so far."""
        return dict(self._weights)

    def update_weights(self, weights: Any, version: str | None = None) -> str:
        """Any plain values by name: tokens depend on all of them. Raises ``ModelError`` for anything else."""
        try:
            together = {**self._weights, **weights}
            digest = crc32(json.dumps(together, sort_keys=True).encode())
        except (TypeError, ValueError) as error:
            raise ModelError(f"the weights of executor sim are plain values by name: {error}") from error
        self._weights, self._twist = together, digest
        return f"sim-{self.options.vocab_size}@{digest if version is None else version}"

    def execute(self, plan: Plan) -> Outcome:
        """One token for each row that samples, after the time that the cost model asks for."""
        options = self.options
        seconds = options.step_ms / 1e3 + options.us_per_token / 1e6 * plan.total_tokens
        if seconds > 0:
            time.sleep(seconds)
        sample, vocab, twist = self._sample, options.vocab_size, self._twist
        known = self._continuations.rows(plan)
        tokens: list[tuple[int, ...]] = [
            (sample(request, row.tokens[-1], row.start + len(row.tokens), vocab, twist),) if samples else ()
            for request, samples, row in zip(plan.requests, plan.samples, known, strict=True)
        ]
        outcome = Outcome(plan, tokens)
        for number, request in enumerate(plan.requests):
            if request.guide is not None and tokens[number]:
                self._guide(outcome, tokens, number, known[number])
        asking = [row for row, request in enumerate(plan.requests) if request.params.reports]
        if asking:
            outcome.logprobs, outcome.prompt_logprobs = self._made_up(plan, tokens, asking)
        if plan.pooled:
            outcome.pooled = self._states(plan)
        return self._continuations.keep(outcome)

    def _guide(self, outcome: Outcome, tokens: list[tuple[int, ...]], number: int, known: Row) -> None:
        """Of the tokens that the row's grammar allows, take the one in whose turn it is. Mutates both."""
        plan = outcome.plan
        request = plan.requests[number]
        assert request.guide is not None
        try:
            mask = request.guide.allowed(request.tokens, request.num_prompt, *certain(plan, number, known))
            allowed = np.flatnonzero(unpacked(mask, self.options.vocab_size))
            if not len(allowed):
                raise GrammarError("no token is left that the grammar allows")
            tokens[number] = (int(allowed[tokens[number][0] % len(allowed)]),)
        except GrammarError as error:
            tokens[number] = ()
            outcome.errors = {**outcome.errors, number: str(error)}

    def _made_up(self, plan: Plan, tokens: Sequence[Sequence[int]], asking: Sequence[int]) -> tuple[Made, Made]:
        """Log-probabilities of the rows whose requests ask for them: of their tokens, and of their prompts'."""
        vocab = self.options.vocab_size
        of_tokens: Made = {}
        of_prompts: Made = {}
        for row in asking:
            request, start = plan.requests[row], plan.starts[row]
            params = request.params
            if params.logprobs is not None and tokens[row]:
                of_tokens[row] = [_rivals(token, params.logprobs, vocab) for token in tokens[row]]
            if params.prompt_logprobs is not None:
                following = request.tokens[start + 1 : min(start + plan.counts[row] + 1, request.num_prompt)]
                of_prompts[row] = [_rivals(token, params.prompt_logprobs, vocab) for token in following]
        return of_tokens, of_prompts

    def _states(self, plan: Plan) -> dict[int, Vector]:
        """Made-up hidden states, whole numbers, so that their sums are exact however a prompt is cut."""
        width, twist = self.options.hidden_size, self._twist
        found: dict[int, Vector] = {}
        for row in plan.pooled:
            tokens = plan.requests[row].tokens
            states = [_state(tokens[0], tokens[at], at, twist, width) for at in plan.pooled_positions(row)]
            if states:
                found[row] = np.sum(states, axis=0, dtype=np.float32)
        return found

    @staticmethod
    def _sample(request: Request, last: int, length: int, vocab: int, twist: int) -> int:
        """A hash of the last token, the first, the position, the seed and the weights."""
        params = request.params
        data = b"%d,%d,%d,%d" % (request.tokens[0], last, length, (params.seed or 0) ^ twist ^ params.choice << 70)
        return crc32(data) % vocab


def _state(first: int, token: int, position: int, twist: int, width: int) -> NDArray[np.int64]:
    """A hidden state: bytes of a hash, from -128 to 127."""
    data = b"%d,%d,%d,%d" % (first, token, position, twist)
    hashed = shake_128(data).digest(width)
    return np.frombuffer(hashed, np.int8).astype(np.int64)


def _rivals(token: int, count: int, vocab: int) -> TokenLogprobs:
    """The token is the likeliest; its rivals are the next ids."""
    own = -0.01 * (1 + token % 100)
    top = range(min(count, vocab))
    rivals = tuple([(token + n) % vocab for n in top])
    return TokenLogprobs(token, own, 1, rivals, tuple([own - 0.5 * n for n in top]))
