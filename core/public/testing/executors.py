"""Executors without a model: chosen tokens, and a KV memory that remembers who wrote what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.continuation import Continuations, Row
from engine.core.hookspecs import hookimpl
from engine.core.memory import KVLayout, layout_digest
from engine.core.plan import Outcome, Plan
from engine.core.protocols import Executor, ModelInfo, Policy
from engine.core.request import Request

Slots = NDArray[np.int64]
Script = Mapping[str, Sequence[int]] | Callable[[Request], int]


class ScriptedModel(Executor):
    """Emits chosen tokens, fails when told to. No model, no torch.

    Args:
        script: request id -> its output tokens in order (the last one repeats), or a function of the request to its
            next token. Default: the number of tokens known so far, modulo the vocabulary.
        vocab_size: token ids are below this.
        max_model_len: most tokens of one request.
        eos_ids: tokens that end a request.

    Attributes:
        plans: every plan executed, in order.
        fail_next: how many coming steps raise.
        row_errors: request id -> message: its next row fails alone.
        drafter: a request, as it will be after the step -> drafts of its next tokens; ``None``: no drafts.
        broken_cause: what ``broken`` answers after a failed step.
    """

    name = "scripted"

    def __init__(
        self,
        script: Script | None = None,
        *,
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.script = script
        self.info = ModelInfo(
            name="scripted", vocab_size=vocab_size, max_model_len=max_model_len, eos_ids=eos_ids, fingerprint="scripted"
        )
        self.plans: list[Plan] = []
        self.fail_next = 0
        self.row_errors: dict[str, str] = {}
        self.drafter: Callable[[Request], tuple[int, ...]] | None = None
        self.broken_cause: str | None = None
        self.known: list[Request] = []  # the last plan's requests with all tokens known when it is computed
        self.verified: list[tuple[int, ...]] = []
        self._continuations = Continuations()
        self._resolved: list[Row] = []
        self.forgotten: list[str] = []

    def load(self) -> ModelInfo:
        """As constructed."""
        return self.info

    def allocate(self, num_pages: int, page_size: int) -> None:
        """There is no KV memory."""

    def execute(self, plan: Plan) -> Outcome:
        """The scripted tokens. Raises ``RuntimeError`` while ``fail_next`` is above 0."""
        if self.fail_next > 0:
            self.fail_next -= 1
            raise RuntimeError("a scripted failure")
        self.plans.append(plan)
        self._resolved = self._continuations.rows(plan)
        self.known = [_known(request, row) for request, row in zip(plan.requests, self._resolved, strict=True)]
        rows = list(zip(self.known, plan.samples, strict=True))
        self.verified = [self._drafts(plan, number) for number in range(len(rows))]
        tokens = [self._emit(r, drafts) if s else () for (r, s), drafts in zip(rows, self.verified, strict=True)]
        proposals: dict[int, tuple[int, ...]] = {}
        if self.drafter is not None:
            for number, (request, samples) in enumerate(rows):
                if samples:
                    proposals[number] = self.drafter(_extended(request, tokens[number]))
        failed = {n: self.row_errors.pop(r.id) for n, (r, _) in enumerate(rows) if r.id in self.row_errors}
        tokens = [() if number in failed else row for number, row in enumerate(tokens)]
        return self._continuations.keep(Outcome(plan, tokens, failed, proposals))

    def broken(self) -> str | None:
        """``broken_cause``."""
        return self.broken_cause

    def forget(self, request: Request) -> None:
        """Noted, so that a test can see that every request is forgotten once."""
        self.forgotten.append(request.id)

    def _drafts(self, plan: Plan, row: int) -> tuple[int, ...]:
        """What a row verifies: as planned; or, planned before the step before was computed, what the drafter says."""
        planned = plan.drafts.get(plan.requests[row], ())
        if not planned or self.drafter is None or not plan.awaits or plan.awaits[row] < 0:
            return tuple(planned)
        return (*self.drafter(self.known[row]), *planned)[: len(planned)]

    def _emit(self, request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
        """The next token; and as long as a draft equals it, the one after."""
        tokens = [self._next(request)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            tokens.append(self._next(_extended(request, tokens)))
        return tuple(tokens)

    def _next(self, request: Request) -> int:
        if callable(self.script):
            return self.script(request)
        if self.script is not None and request.id in self.script:
            output = self.script[request.id]
            return output[min(request.num_output, len(output) - 1)]
        return request.num_tokens % self.info.vocab_size


def _known(request: Request, row: Row) -> Request:
    """The request as it is once the step before its row's is committed (zeros stand for what a failed row yields)."""
    before = [*request.tokens, *row.before][: row.start]
    return replace(request, tokens=[*before, *[0] * (row.start - len(before)), *row.tokens])


def _extended(request: Request, tokens: Sequence[int]) -> Request:
    """The request as it would be with more tokens."""
    return replace(request, tokens=[*request.tokens, *tokens])


class KVMismatch(AssertionError):
    """A row was about to attend to KV that is not that of its own tokens: a real model would write wrong text."""


ScriptedExecutor = ScriptedModel


class ShadowExecutor(ScriptedModel):
    """A scripted model over KV memory that remembers, for each token slot, which sequence wrote it.

    Like a real executor it writes the KV of all rows first and reads after, so twins of one step may share pages. Every
    read is compared with what the row's own tokens would have written; the first difference raises ``KVMismatch``.

    In overlap mode a row may rightly read garbage, if what it continues has failed and its result is dropped. There
    ``mismatch`` is set when the result of such a row is committed: run ``witness`` among the policies (``make_core``
    does).

    Attributes:
        mismatch: the first row that counted and had read foreign or unwritten KV, in words.
        witness: a policy that looks at what is committed.
        marks: the memory, ``[num_pages, page_size]``: a number for the sequence that wrote each slot, 0 for nothing.
    """

    def __init__(self, script: Script | None = None, **model: Any) -> None:
        super().__init__(script, **model)
        self.mismatch: str | None = None
        self.suspects: dict[int, dict[int, str]] = {}  # step -> row -> what it should not have read
        self.witness = Witness(self)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Memory of ``num_pages x page_size`` slots, all unwritten."""
        self.marks = np.zeros((num_pages, page_size), np.int64)  # 0: unwritten
        self._size = page_size
        self._prefixes: dict[str, list[int]] = {}

    def execute(self, plan: Plan) -> Outcome:
        """Write, then read and compare. Raises what ``ScriptedModel`` does, before anything is written."""
        outcome = super().execute(plan)
        starts = [row.start for row in self._resolved]
        marks = [
            self._marks(request, start + count, drafts)
            for request, start, count, drafts in zip(self.known, starts, plan.counts, self.verified, strict=True)
        ]
        rows = [
            (request, self._where(table, start + count), start, np.array(wanted[: start + count], np.int64))
            for request, start, count, table, wanted in zip(
                plan.requests, starts, plan.counts, plan.tables, marks, strict=True
            )
        ]
        memory = self.marks.reshape(-1)
        for _, slots, start, wanted in rows:
            memory[slots[start:]] = wanted[start:]
        suspects: dict[int, str] = {}
        for row, (request, slots, _, wanted) in enumerate(rows):
            wrong = memory[slots] != wanted
            if wrong.any():
                at = int(wrong.argmax())
                suspects[row] = f"step {plan.index}: {request!r} reads foreign or unwritten KV at token {at}"
        if suspects and not plan.awaits:
            self.mismatch = next(iter(suspects.values()))
            raise KVMismatch(self.mismatch)
        self.suspects[plan.index] = suspects
        for row in {*outcome.errors, *suspects}:  # what they have written is garbage: whoever reads it must be caught
            _, slots, start, _ = rows[row]
            memory[slots[start:]] = 0
        return outcome

    def _where(self, table: Sequence[int], upto: int) -> Slots:
        """The slots of the first ``upto`` tokens."""
        pages = np.array(table[: -(-upto // self._size)], np.int64)
        slots: Slots = (pages[:, None] * self._size + np.arange(self._size)).reshape(-1)[:upto]
        return slots

    def kv_layout(self) -> KVLayout:
        """The marks themselves are what connectors move."""
        rows = self.marks.view(np.uint8).reshape(len(self.marks), -1)
        return KVLayout((rows,), layout_digest(kind="marks", page_size=self._size))

    def forget(self, request: Request) -> None:
        """Drop the request's marks too."""
        super().forget(request)
        self._prefixes.pop(request.id, None)

    def _marks(self, request: Request, upto: int, drafts: Sequence[int]) -> list[int]:
        """A mark per position that depends on the namespace and all tokens (and drafts) up to it."""
        marks = self._prefixes.setdefault(request.id, [])
        for at in range(len(marks), min(upto, len(request.tokens))):
            marks.append(_mark(marks[-1] if marks else request.namespace, request.tokens[at]))
        if upto <= len(request.tokens):
            return marks
        drafted = list(marks)  # drafts may be rejected: their marks are not remembered
        for draft in drafts[: upto - len(request.tokens)]:
            drafted.append(_mark(drafted[-1], draft))
        return drafted


def _mark(before: int | bytes, token: int) -> int:
    """Of one position, from the one before (the namespace, for the first): the same in every process, never 0."""
    data = before if isinstance(before, bytes) else before.to_bytes(8, "little")
    digest = blake2b(data + token.to_bytes(8, "little", signed=True), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 1


class Witness(Policy):
    """Sees which rows of a ``ShadowExecutor``'s steps count. Answers nothing."""

    name = "witness"

    def __init__(self, executor: ShadowExecutor) -> None:
        super().__init__()
        self._executor = executor

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """A row that read what it should not have is a mismatch, unless its result was dropped."""
        for row, words in self._executor.suspects.pop(outcome.plan.index, {}).items():
            if row not in outcome.dropped and row not in outcome.errors:
                self._executor.mismatch = self._executor.mismatch or words
