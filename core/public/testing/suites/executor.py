"""What every executor must do: a request's tokens depend on the request, not on the batch, the pages or the loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from engine.core.config import DEFAULT_MODEL
from engine.core.grammar import Grammar
from engine.core.loop import EngineCore
from engine.core.plan import Delta, Outcome, Plan
from engine.core.pooling import Pooling
from engine.core.protocols import Executor, Plugin
from engine.core.registry import make
from engine.core.sampling import SamplingParams, TokenLogprobs
from engine.testing.grammars import Ladder, climbs, vocabulary
from engine.testing.guard import Violation, snapshot
from engine.testing.making import make_core
from engine.testing.suites.base import Suite
from engine.testing.workload import closing

Grammars = Sequence[Grammar | None]


class ExecutorSuite(Suite):
    """Rules of an executor.

    Class attributes:
        use: what ``Executor.use`` is told (``model``, ``attention``, ``seed``), where it is not the default.
        prompts: token ids to try, some with a common beginning.
        new_tokens: tokens to generate for each.
        page_sizes: tokens a page.
        vector_tolerance: by how much a number of a vector may differ, as a part of the largest, where it is computed
            otherwise.
        logprob_tolerance: by how much a log-probability may differ where the prompt is computed in other chunks.
    """

    role = "executor"
    use: ClassVar[Mapping[str, Any]] = {}
    prompts: ClassVar[tuple[tuple[int, ...], ...]] = (
        (5, 6, 7, 8, 9, 10, 11, 12, 13), (5, 6, 7, 8, 9, 10, 11, 12, 14, 15), (40,), (3, 1, 4, 1, 5, 9, 2, 6),
    )  # fmt: skip
    new_tokens: ClassVar[int] = 6
    page_sizes: ClassVar[tuple[int, ...]] = (1, 4)
    logprob_tolerance: ClassVar[float] = 1e-3
    vector_tolerance: ClassVar[float] = 1e-3

    def ready(self) -> Executor:
        """A new executor, told what to use."""
        executor: Executor = self.make()
        self._tell(executor)
        return executor

    def _tell(self, executor: Executor) -> None:
        chosen = {"model": DEFAULT_MODEL, "attention": None, "seed": 0, **self.use}
        if executor.uses_attention and chosen["attention"] is None:
            chosen["attention"] = make("attention", "torch")
        executor.use(**chosen)

    def try_once(self, plugin: Plugin) -> None:
        """One request, alone."""
        assert isinstance(plugin, Executor)
        self._tell(plugin)
        core = make_core(executor=plugin, max_model_len=64)
        with closing(core):
            core.add(list(self.prompts[0]), SamplingParams(temperature=0, max_tokens=1))
            while core.has_work:
                core.step()

    def test_outcomes_are_well_formed(self) -> None:
        """One list of tokens a row, empty where the row does not sample; tokens are in the vocabulary; no request is
        touched; a request that is forgotten is forgotten without ado."""
        executor = self.ready()
        core = make_core(executor=executor, max_batch_tokens=8, max_model_len=64)
        with closing(core):
            for prompt in self.prompts:
                core.add(list(prompt), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            while core.has_work:
                plan = core.plan()
                if plan:
                    before = snapshot(core)
                    outcome = executor.execute(plan)
                    if snapshot(core) != before:
                        raise Violation("execute changed a request")
                    self._well_formed(plan, outcome, core.model.vocab_size)
                else:
                    outcome = Outcome(plan, ())
                core.commit(outcome)
                core.take_deltas()

    @staticmethod
    def _well_formed(plan: Plan, outcome: Outcome, vocab: int) -> None:
        if outcome.plan is not plan or len(outcome.tokens) != len(plan.requests):
            raise Violation(f"{len(plan.requests)} rows were planned, {len(outcome.tokens)} came back")
        if outcome.errors:
            raise Violation(f"rows failed: {dict(outcome.errors)}")
        for row, (tokens, samples) in enumerate(zip(outcome.tokens, plan.samples, strict=True)):
            if bool(tokens) != samples or any(not 0 <= token < vocab for token in tokens):
                raise Violation(f"row {row} (samples: {samples}) yields {list(tokens)}; the vocabulary is {vocab}")

    def test_tokens_do_not_depend_on_the_company(self) -> None:
        """A request says the same alone, in a batch, in chunks, on a cached prefix, with pages of any size, after a
        preemption, and in both loops."""
        alone = [self._texts([prompt])[0] for prompt in self.prompts]
        overlaps = (False, True) if self.found().cls.overlaps else (False,)  # type: ignore[attr-defined]
        for (size, budget), overlap in itertools.product(zip(self.page_sizes, (4, 64), strict=False), overlaps):
            settings = {"page_size": size, "max_batch_tokens": budget, "overlap": overlap}
            for cycle, texts in enumerate(self._twice(settings)):
                if texts != alone:
                    raise Violation(f"together ({settings}, time {cycle + 1}) they say {texts}, alone {alone}")

    def test_log_probabilities_belong_to_the_tokens(self) -> None:
        """Of those that report them: one for each token, likeliest first, the same whether the prompt is cut or not."""
        executor = self.ready()
        if not {"logprobs", "prompt_logprobs"} <= set(executor.sampling):
            return
        whole, cut = (self._reports(executor if budget == 64 else self.ready(), budget) for budget in (64, 4))
        for one, other in zip(whole, cut, strict=True):
            if one.token != other.token or abs(one.logprob - other.logprob) > self.logprob_tolerance:
                raise Violation(f"{one} in one piece, {other} in chunks")

    def test_vectors_do_not_depend_on_the_company(self) -> None:
        """Of those that compute them: a request that pools comes to the same alone in one piece, and in chunks, in a
        batch, on a cached prefix, after a preemption, in both loops; and brings no token."""
        cls = self.found().cls
        kinds = cls.pooling  # type: ignore[attr-defined]
        if not kinds:
            return
        poolings = [Pooling(kind=kind, normalize=False) for kind in kinds for _ in self.prompts]
        core = self._core({})
        with closing(core):
            alone = [
                self._vectors(core, [prompt], [one], read_cache=False)[0]
                for prompt, one in zip(self.prompts * len(kinds), poolings, strict=True)
            ]
        for overlap in (False, True) if cls.overlaps else (False,):  # type: ignore[attr-defined]
            settings = {"page_size": self.page_sizes[-1], "max_batch_tokens": 8, "overlap": overlap}
            core = self._core(settings)
            with closing(core):
                for preempt in (False, True):
                    found = self._vectors(core, self.prompts * len(kinds), poolings, preempt=preempt)
                    for pooling, mine, wanted in zip(poolings, found, alone, strict=True):
                        if not np.allclose(mine, wanted, atol=self.vector_tolerance * np.abs(wanted).max()):
                            raise Violation(f"together ({settings}) {pooling} is {mine}, alone {wanted}")

    def test_grammars_are_kept(self) -> None:
        """Of those that act on grammars: nothing is said that the grammar does not allow, and what is said does not
        depend on the company, in either loop, after a preemption; whoever has no grammar does not notice."""
        if "grammar" not in self.found().cls.sampling:  # type: ignore[attr-defined]
            return
        guided = Grammar.regex("any")
        alone = [self._texts([prompt], grammars=[guided])[0] for prompt in self.prompts[::2]]
        free = [self._texts([prompt])[0] for prompt in self.prompts[1::2]]
        for overlap in (False, True) if self.found().cls.overlaps else (False,):  # type: ignore[attr-defined]
            settings = {"page_size": self.page_sizes[-1], "max_batch_tokens": 16, "overlap": overlap}
            for texts in self._twice(settings, grammars=[guided, None] * len(alone)):
                if not all(map(climbs, texts[::2])):
                    raise Violation(f"what the grammar does not allow was said: {texts[::2]}")
                if texts[::2] != alone or texts[1::2] != free:
                    raise Violation(
                        f"together ({settings}) they say {texts}; alone {alone}, and without a grammar {free}"
                    )

    def _vectors(
        self, core: EngineCore, prompts: Any, poolings: Any, *, preempt: bool = False, read_cache: bool = True
    ) -> list[Any]:
        requests = [
            core.add(list(prompt), pooling=one, read_cache=read_cache)
            for prompt, one in zip(prompts, poolings, strict=True)
        ]
        deltas: list[Delta] = []
        for turn in range(1000):
            if not core.has_work:
                ends = {delta.request_id: delta for delta in deltas}
                if len(ends) != len(deltas) or not all(end.vector for end in deltas):
                    raise Violation(f"not one vector for each request: {deltas}")
                return [np.frombuffer(ends[request.id].vector, "<f4") for request in requests]
            deltas += core.step()
            if preempt and turn == 1:
                deltas += core.drain()
                for request in list(core.running):
                    core.give_up(request, front=True)
        raise Violation("the requests have not ended after 1000 steps")

    def _reports(self, executor: Executor, budget: int) -> list[TokenLogprobs]:
        core = make_core(executor=executor, max_batch_tokens=budget, max_model_len=60)
        with closing(core):
            prompt = self.prompts[0]
            asks = SamplingParams(
                temperature=0, max_tokens=self.new_tokens, ignore_eos=True, logprobs=2, prompt_logprobs=2
            )
            request = core.add(list(prompt), asks)
            deltas = []
            while core.has_work:
                deltas += core.step()
            found = [one for delta in deltas for one in (*delta.prompt_logprobs, *delta.logprobs)]
            if [one.token for one in found] != request.tokens[1:]:
                raise Violation(f"log-probabilities of {[one.token for one in found]}, tokens {request.tokens[1:]}")
            for one in found:
                likeliest = list(one.top_logprobs)
                if one.logprob > 0 or len(one.top) != 2 or likeliest != sorted(likeliest, reverse=True):
                    raise Violation(f"no log-probabilities with two rivals, likeliest first: {one}")
                if (one.rank == 1) != (one.logprob >= likeliest[0]):
                    raise Violation(f"its rank is wrong: {one}")
            return found

    def _texts(self, prompts: Any, grammars: Grammars = (), **settings: Any) -> list[list[int]]:
        core = self._core(settings)
        with closing(core):
            return self._run(core, prompts, grammars)

    def _core(self, settings: Mapping[str, Any]) -> EngineCore:
        given = {"num_pages": 64, "max_model_len": 60, "grammar": Ladder(), "vocabulary": vocabulary, **settings}
        return make_core(executor=self.ready(), **given)

    def _twice(self, settings: Mapping[str, Any], grammars: Grammars = ()) -> list[list[list[int]]]:
        """The second time prefixes are cached, and everybody is preempted once."""
        core = self._core(settings)
        with closing(core):
            return [self._run(core, self.prompts, grammars), self._run(core, self.prompts, grammars, preempt=True)]

    def _run(self, core: Any, prompts: Any, grammars: Grammars = (), *, preempt: bool = False) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True, seed=0)
        wishes = [replace(params, grammar=grammar) for grammar in grammars] or [params] * len(prompts)
        requests = [core.add(list(prompt), wish) for prompt, wish in zip(prompts, wishes, strict=True)]
        while len(core.grammars):
            core.grammars.collect()
            time.sleep(0.001)
        for turn in range(1000):
            if not core.has_work:
                return [request.output for request in requests]
            core.step()
            if preempt and turn == 3:
                core.drain()
                for request in list(core.running):
                    core.give_up(request, front=True)
        raise Violation("the requests have not ended after 1000 steps")
