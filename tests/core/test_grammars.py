"""Structured output in the engine: parked until it is compiled, followed whatever happens, and nobody else notices."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import string
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM
from engine.core import Grammar, GrammarCompiler, GrammarError, InvalidRequest, SamplingParams
from engine.core import grammar as grammar_module
from engine.core.grammar import Guide, unpacked, vocabulary_of
from engine.core.grammar_desk import MOST_LOST, MOST_MATCHERS
from engine.core.protocols import ModelInfo
from engine.core.record.desk import RecordOptions
from engine.core.record.reading import read
from engine.core.registry import make
from engine.core.replay.log import replay
from engine.testing import make_core
from engine.testing.suites.grammar import END, LIST, PERSON, vocabulary
from engine.testing.suites.grammar import SAMPLES as ALL_SAMPLES

VOCABULARY = vocabulary()
SAMPLES = [sample for sample in ALL_SAMPLES if sample.grammar.kind != "ebnf"]  # llguidance knows no EBNF
MUTANTS = Path(__file__).parents[1] / "testing" / "grammar_mutants.py"


@pytest.fixture(scope="module")
def plain():
    """The compiler that `engine plugins new` writes: choices."""
    spec = importlib.util.spec_from_file_location("grammar_template", MUTANTS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Plain


def core_of(grammar, **more):
    model = make("executor", "sim", {"eos_id": END, "vocab_size": VOCABULARY.size})
    return make_core(executor=model, grammar=grammar, vocabulary=VOCABULARY, **more)


def text_of(request):
    return b"".join(VOCABULARY.tokens[token] for token in request.output if token != END).decode()


def run(core):
    while core.has_work:
        core.step()


def compiled(core):
    """All grammars are there before anything is computed."""
    while len(core.grammars):
        core.grammars.collect()
        time.sleep(0.001)


def library():
    pytest.importorskip("llguidance", reason="structured output needs pip install 'sixhooks[grammar]'")
    return "llguidance"


# ---- whatever happens


def free(core, n):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    return core.add([100 + n] * 7, params, request_id=f"free-{n}")


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
@pytest.mark.parametrize("pages", [80, 14], ids=["roomy", "tight"])
def test_all_that_is_said_is_of_the_grammar(scheduler, overlap, pages):
    """In both schedulers, in both loops, preempted or not; and it is the same in all of them."""
    settings = {"scheduler": scheduler, "overlap": overlap, "max_running": 8}
    if scheduler == "radix":
        settings["scheduler_options"] = {"schedule_conservativeness": 0.1}
    alone = core_of(library(), num_pages=80, **settings)
    neighbours = [free(alone, n) for n in range(3)]
    run(alone)
    core = core_of(library(), num_pages=pages, **settings)
    company = [free(core, n) for n in range(3)]
    wanted = [(sample, core.add([n, 2], SamplingParams(max_tokens=60, grammar=sample.grammar), request_id=f"{n}"))
              for n, sample in enumerate(SAMPLES)]  # fmt: skip
    compiled(core)
    run(core)
    for sample, request in wanted:
        assert request.finish == "stop", (request, request.detail)
        assert sample.check(text_of(request)), text_of(request)
        single = core_of(library(), num_pages=80)
        again = single.add([int(request.id), 2], SamplingParams(max_tokens=60, grammar=sample.grammar))
        run(single)
        assert again.output == request.output
    assert [other.output for other in company] == [other.output for other in neighbours]
    if pages == 14:
        assert sum(request.preemptions for _, request in wanted) + sum(other.preemptions for other in company)


def test_a_request_is_cut_by_its_length():
    core = core_of(library())
    long = {"type": "string", "minLength": 50, "maxLength": 60}
    request = core.add([1], SamplingParams(max_tokens=5, grammar=Grammar.json(long)))
    run(core)
    assert (request.finish, request.num_output) == ("length", 5)


def test_choices_of_one_prompt_have_matchers_of_their_own():
    core = core_of(library())
    grammar = Grammar.json(PERSON)
    params = SamplingParams(n=4, seed=5, grammar=grammar, max_tokens=300)
    requests = [core.add([7], choice) for choice in params.choices()]
    run(core)
    assert all(json.loads(text_of(request)).keys() == {"name", "old"} for request in requests)
    assert len({tuple(request.output) for request in requests}) > 1
    assert core.grammars.compiled == 1


# ---- waiting for it


class Slow(GrammarCompiler):
    """Compiles when it is let. One of two texts, ``ab`` or ``no``."""

    name = "slow"
    kinds = ("choice",)

    def __init__(self, plain):
        super().__init__()
        self._plain, self.let, self.begun = plain(), threading.Event(), threading.Semaphore(0)

    def prepare(self, vocabulary):
        self._plain.prepare(vocabulary)

    def compile(self, grammar):
        self.begun.release()
        assert self.let.wait(60)
        return self._plain.compile(grammar)


def test_it_waits_outside_the_queue_and_nobody_waits_for_it(plain):
    slow = Slow(plain)
    core = core_of(slow)
    request = core.add([1], SamplingParams(grammar=Grammar.choice(["ab"])))
    other = free(core, 1)
    assert core.why(request.id) == ("parked", "grammar")
    while not other.finished:
        core.step()
    assert not request.finished
    assert core.has_work
    assert not core.settled
    slow.let.set()
    run(core)
    assert (text_of(request), request.finish) == ("ab", "stop")
    assert core.settled


def test_one_that_takes_too_long_is_refused_and_threads_that_are_lost_are_counted(plain):
    slow = Slow(plain)
    core = core_of(slow, grammar_seconds=0.02)
    other = free(core, 0)
    stuck = [
        core.add([1], SamplingParams(grammar=Grammar.choice([f"a{n}"], field="response_format")))
        for n in range(MOST_LOST)
    ]
    run(core)
    refused = dict(core.take_refused())
    assert set(refused) == {request.id for request in stuck}
    assert {error.code for error in refused.values()} == {"above_limit"}
    assert all("response_format: took more than 0.02 s" in str(error) for error in refused.values())
    assert all((request.finish, request.detail) == ("error", str(refused[request.id])) for request in stuck)
    assert other.finish == "length"
    again = core.add([1], SamplingParams(grammar=Grammar.choice(["a0"])))  # known to take too long: no thread is lost
    late = core.add([1], SamplingParams(grammar=Grammar.choice(["no"])))
    run(core)
    words = {request_id: str(error) for request_id, error in core.take_refused()}
    assert "took more than" in words[again.id]
    assert f"{MOST_LOST} grammars that take too long" in words[late.id]
    slow.let.set()
    for _ in range(MOST_LOST):
        slow.begun.acquire()
    while threading.active_count() > 1 and any(thread.name == "grammar" for thread in threading.enumerate()):
        time.sleep(0.001)
    late = core.add([1], SamplingParams(grammar=Grammar.choice(["no"])))
    run(core)
    assert (text_of(late), core.take_refused()) == ("no", [])


def test_one_that_left_is_not_compiled_for(plain):
    slow = Slow(plain)
    core = core_of(slow)
    grammar = Grammar.choice(["ab"])
    first, second = (core.add([n], SamplingParams(grammar=grammar)) for n in range(2))
    core.step()
    assert core.abort(first.id)
    assert core.abort(first.id) is False
    slow.let.set()
    run(core)
    assert (first.finish, second.finish, text_of(second)) == ("abort", "stop", "ab")
    queued = core.add([3], SamplingParams(grammar=Grammar.choice(["no"])))
    core.abort(queued.id)  # before any thread has begun
    run(core)
    assert core.grammars.compiled == 1
    third = core.add([3], SamplingParams(grammar=grammar))
    run(core)
    assert (third.finish, core.grammars.compiled) == ("stop", 1)  # kept


def test_an_engine_that_closes_ends_them(plain):
    slow = Slow(plain)
    core = core_of(slow)
    request = core.add([1], SamplingParams(grammar=Grammar.choice(["ab"])))
    core.step()
    slow.let.set()
    core.close()
    assert request.finish == "abort"
    assert not any(thread.name == "grammar" for thread in threading.enumerate())


# ---- what goes wrong


BAD = [
    Grammar.json({"type": "str"}),
    Grammar.json({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}),
    Grammar.json({"type": "array", "uniqueItems": True}),
    Grammar.json({"not": {"type": "string"}}),
    Grammar.json({"$ref": "#"}),
    Grammar.json({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    Grammar.json({"type": "string", "pattern": "("}),
    Grammar.regex("(a"),
    Grammar.regex(r"(?=a)b"),
    Grammar.lark("start: nowhere"),
    Grammar.lark("root ::= 'a'"),
]


def test_twenty_bad_ones_at_once_harm_nobody():
    """After a good one, with another good one and neighbours in the batch, which say what they always say."""
    alone = core_of(library())
    neighbours = [free(alone, n) for n in range(3)]
    run(alone)
    core = core_of(library())
    good = [core.add([1], SamplingParams(max_tokens=40, grammar=Grammar.json(LIST)), request_id="before")]
    run(core)
    company = [free(core, n) for n in range(3)]
    bad = [core.add([n], SamplingParams(grammar=grammar)) for n, grammar in enumerate([*BAD, *BAD])]
    good.append(core.add([1], SamplingParams(max_tokens=40, grammar=Grammar.json(LIST)), request_id="after"))
    run(core)
    assert [request_id for request_id, _ in core.take_refused()] == [request.id for request in bad] or {
        request.finish for request in bad
    } == {"error"}
    assert all(request.detail.startswith("grammar: ") for request in bad)
    assert good[0].output == good[1].output
    assert isinstance(json.loads(text_of(good[1])), list)
    assert [request.output for request in company] == [request.output for request in neighbours]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"grammar": "json"}, "grammar: must be a Grammar, not str"),
        ({"grammar": Grammar(kind="yaml", text="x")}, "unknown kind 'yaml'"),
        ({"grammar": Grammar(kind="json", text="{", field="response_format")}, "response_format: is not valid JSON"),
        ({"grammar": Grammar(kind="json", text="[]")}, "a JSON schema is an object, not list"),
        ({"grammar": Grammar.json("[" * 100_000)}, "above the limit|has 100000 bytes|at most"),
        ({"grammar": Grammar.json("[" * 5_000)}, "is not valid JSON"),
        ({"grammar": Grammar.json({"type": "string", "description": "x" * 70_000})}, "at most 65536 are allowed"),
        ({"grammar": Grammar.choice([])}, "at least one text"),
        ({"grammar": Grammar.choice(["a", ""])}, "an empty text is no choice"),
        ({"grammar": Grammar(kind="choice", text='["a", 1]')}, "at least one text"),
        ({"grammar": Grammar.choice(["a"] * 5_000)}, "has 5000 texts, at most 4096"),
        ({"grammar": Grammar.regex("  ")}, "is empty"),
        ({"grammar": Grammar.regex("\ud800")}, "not valid Unicode"),
        ({"grammar": Grammar.regex("a"), "min_tokens": 1}, "min_tokens: cannot be promised"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_at_once(params, words):
    core = core_of(library())
    with pytest.raises(InvalidRequest, match=words):
        core.add([1], SamplingParams(**params))
    assert not core.requests


def test_a_deep_schema_is_refused():
    schema = {"type": "string"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="nested more than 64 deep"):
        core_of(library()).add([1], SamplingParams(grammar=Grammar.json(schema)))


def test_where_there_is_no_compiler_or_no_executor_for_it_is_said():
    with pytest.raises(InvalidRequest, match="response_format: grammars of kind json are not available"):
        core_of(None).add([1], SamplingParams(grammar=Grammar.json(field="response_format")))
    with pytest.raises(InvalidRequest, match="response_format: is not supported by the executor"):
        make_core(grammar=library()).add([1], SamplingParams(grammar=Grammar.json(field="response_format")))


class Trips(GrammarCompiler):
    """Becomes too complex after three tokens."""

    name = "trips"
    kinds = ("regex",)
    accepting = False

    def prepare(self, vocabulary):
        pass

    def compile(self, grammar):
        return self

    def matcher(self):
        self.count = 0
        return self

    def accept(self, token):
        self.count += 1
        return True

    def rollback(self, count):
        self.count -= count

    def fill(self, mask):
        if self.count == 3:
            raise GrammarError("too complex")
        mask.fill(-1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(overlap):
    core = core_of(Trips(), overlap=overlap)
    other = free(core, 0)
    request = core.add([1], SamplingParams(grammar=Grammar.regex("x"), ignore_eos=True, max_tokens=20))
    run(core)
    assert (request.finish, request.detail, request.num_output) == ("error", "too complex", 3)
    assert other.finish == "length"


def test_a_compiler_that_raises_is_one_requests_trouble(caplog):
    class Raises(Trips):
        """Knows nothing."""

        def compile(self, grammar):
            raise KeyError("nothing")

    core = core_of(Raises())
    other = free(core, 0)
    request = core.add([1], SamplingParams(grammar=Grammar.regex("x")))
    run(core)
    assert request.detail == "grammar: cannot be compiled: KeyError: 'nothing'"
    assert other.finish == "length"
    assert "could not be compiled" in caplog.text


# ---- the guide


def _chain(links):
    """A schema that refers on and on, without being nested."""
    names = ["".join(pair) for pair in itertools.islice(itertools.product(string.ascii_letters, repeat=2), links)]
    steps = {one: {"anyOf": [{"$ref": f"#/$defs/{two}"}, {"type": "null"}]} for one, two in itertools.pairwise(names)}
    whole = {"$defs": {**steps, names[-1]: {"type": "null"}}, "$ref": f"#/$defs/{names[0]}"}
    return json.dumps(whole, separators=(",", ":"))


DEEP = """
import sys
sys.path.insert(0, sys.argv[1])
from test_grammars import Grammar, SamplingParams, _chain, core_of, compiled
core = core_of("llguidance")
one = core.add([1], SamplingParams(max_tokens=4, grammar=Grammar.json(_chain(1190))))
two = core.add([1], SamplingParams(max_tokens=4, grammar=Grammar.lark(
    "\\n".join([*(f'a{n}: "x" a{n + 1}' for n in range(3000)), 'a3000: "y"', "start: a0"]))))
compiled(core)
while core.has_work:
    core.step()
assert one.finish is not None and two.finish is not None
core.close()
print("alive")
"""


def test_a_schema_that_refers_on_and_on_does_not_end_the_process():
    """The library goes deeper with every reference: an overrun stack is no exception but the end."""
    library()
    command = [sys.executable, "-c", DEEP, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "alive" in done.stdout


def test_what_one_output_runs_into_is_nobody_elses():
    """Matchers of one grammar share no limit: the states of one output's lexer are not another's."""
    library()
    compiler = make("grammar", "llguidance", {"max_lexer_states": 2000})
    compiler.prepare(VOCABULARY)
    grammar = compiler.compile(Grammar.regex("y[a-z]+|x(a|b)*a(a|b){40}c"))
    rng, one, other = random.Random(3), grammar.matcher(), grammar.matcher()
    token = {data: at for at, data in reversed([*enumerate(VOCABULARY.tokens)]) if len(data) == 1}
    one.accept(token[b"x"])

    def on_and_on():
        for _ in range(5000):
            one.accept(token[rng.choice([b"a", b"b"])])
            one.fill(np.zeros(VOCABULARY.words, np.int32))

    with pytest.raises(GrammarError, match="too many"):
        on_and_on()
    for matcher in (other, grammar.matcher()):
        for data in (b"y", b"a", b"b", b"c"):
            assert matcher.accept(token[data])


def test_marks_beyond_the_vocabulary_are_none_of_it():
    """Gemma 3 has such: a tokenizer with a special token that the model has no logit for."""

    class Tokens:
        vocab_size, special_ids = 6, frozenset({0, 5, 7})

        @staticmethod
        def token_bytes(token):
            return b"" if token in (0, 5) else bytes([96 + token])

    found = vocabulary_of(Tokens(), ModelInfo(name="m", vocab_size=6, max_model_len=9, eos_ids=frozenset({0})))
    assert found.special_ids == {0, 5}
    library()
    compiler = make("grammar", "llguidance")
    compiler.prepare(found)
    assert compiler.compile(Grammar.choice(["ab"])).matcher().accept(1)


def test_a_grammar_that_cannot_be_taken_back_is_refused():
    library()
    compiler = make("grammar", "llguidance")
    compiler.prepare(VOCABULARY)
    with pytest.raises(InvalidRequest, match="rollback not supported with max_tokens"):
        compiler.compile(Grammar.lark('start: "ab" a "x"\na[max_tokens=3]: /[a-z]+/'))


@pytest.mark.parametrize("rules", ['start: "ab" "x"', 'start: "a"?'], ids=["begins with a text", "may be empty"])
def test_the_matcher_that_a_grammar_was_tried_with_is_as_good_as_new(rules):
    library()
    compiler = make("grammar", "llguidance")
    compiler.prepare(VOCABULARY)
    compiled = compiler.compile(Grammar.lark(rules))
    masks = np.zeros((2, VOCABULARY.words), np.int32)
    for mask in masks:
        compiled.matcher().fill(mask)
    assert masks.any()
    assert np.array_equal(*masks)


def test_masks_that_take_too_long_and_errors_of_libraries_end_one_request(monkeypatch):
    """All rows of a step wait for a mask."""
    clock = itertools.count()
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(clock) * 0.06)

    class Any:
        accepting = False

        def fill(self, mask):
            mask[:] = -1

        def accept(self, token):
            raise IndexError("of the library")

    guide = Guide(Any(), VOCABULARY)
    for _ in range(4):
        guide.allowed([1], 1, 1)
    with pytest.raises(GrammarError, match=r"5 masks of the grammar took more than 0\.05 s each"):
        guide.allowed([1], 1, 1)
    with pytest.raises(GrammarError, match="IndexError: of the library"):
        Guide(Any(), VOCABULARY).allowed([1, 2], 1, 2)


def test_more_requests_than_a_job_makes_matchers_for():
    library()
    core = core_of("llguidance", max_running=64, num_pages=400)
    grammar = Grammar.choice(["yes", "no"])
    asked = [core.add([1, n], SamplingParams(max_tokens=4, grammar=grammar)) for n in range(3 * MOST_MATCHERS + 1)]
    run(core)
    assert {text_of(request) for request in asked} <= {"yes", "no"}
    assert core.grammars.compiled == 1
    core.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SAMPLES[:2]))
def test_a_guide_follows_from_the_output_alone(seed, sample):
    """Whatever it was asked before: tokens in flight that came to nothing, drafts, an end that was taken back."""
    compiler = make("grammar", library())
    compiler.prepare(VOCABULARY)
    compiled, rng = compiler.compile(sample.grammar), random.Random(seed)
    guide, output = Guide(compiled.matcher(), VOCABULARY), [9, 9]
    for _ in range(12):
        pending = []
        for _ in range(rng.randint(0, 3)):
            fresh = Guide(compiled.matcher(), VOCABULARY).allowed(output, 2, len(output), pending)
            pending.append(int(rng.choice(np.flatnonzero(unpacked(fresh, VOCABULARY.size)))))
            mask = guide.allowed(output, 2, len(output), pending[: rng.randint(0, len(pending))])
        mask = guide.allowed(output, 2, len(output), pending).copy()
        assert np.array_equal(mask, Guide(compiled.matcher(), VOCABULARY).allowed(output, 2, len(output), pending))
        output += pending[: rng.randint(0, len(pending))]


def test_after_the_end_there_are_only_ends(plain):
    compiler = plain()
    compiler.prepare(VOCABULARY)
    guide = Guide(compiler.compile(Grammar.choice(["ab"])).matcher(), VOCABULARY)
    said = VOCABULARY.tokens.index(b"ab")
    for pending in ([said], [said, END], [said, END, 77], [said, END, END]):
        assert np.flatnonzero(unpacked(guide.allowed([], 0, 0, pending), VOCABULARY.size)).tolist() == [END]
    with pytest.raises(GrammarError, match="token 77 cannot follow"):
        guide.allowed([], 0, 0, [77])
    with pytest.raises(GrammarError, match=f"token {END} cannot follow"):
        Guide(compiler.compile(Grammar.choice(["ab"])).matcher(), VOCABULARY).allowed([], 0, 0, [END])


# ---- from outside


def test_a_recording_of_it_is_replayed_without_the_compiler(tmp_path):
    core = core_of(library(), record=RecordOptions(on=True))
    free(core, 0)
    core.add([1], SamplingParams(max_tokens=60, grammar=Grammar.json(LIST)))
    core.add([2], SamplingParams(max_tokens=60, grammar=Grammar.json({"type": "str"})))
    run(core)
    core.record.write(tmp_path / "grammars.jsonl")
    assert replay(read(tmp_path / "grammars.jsonl"), "grammars").equal


@pytest.mark.model
def test_in_this_process(tmp_path):
    """``LLM``: text in, structured text out, and a refusal as an error."""
    library()
    with LLM(executor={"name": "sim", "eos_id": 2}, num_pages=64) as llm:
        grammar = Grammar.regex(r"(red|green) [0-9]{2}")
        found = llm.generate(["a colour", "another"], SamplingParams(grammar=grammar, max_tokens=20))
        assert all(re.fullmatch(r"(red|green) [0-9]{2}", completion.text) for completion in found)
        with pytest.raises(InvalidRequest, match="grammar: cannot be compiled: Invalid type: str"):
            llm.generate("x", SamplingParams(grammar=Grammar.json({"type": "str"})))
        assert llm.generate("a colour", SamplingParams(grammar=grammar, max_tokens=20))[0] == found[0]
