"""Workloads: what they are made of, how they are written, and the formats of traces."""

from __future__ import annotations

import itertools
import json
import statistics

import pytest

from engine.core import ConfigError
from engine.lab import Arrival, Piece, Workload, source, sources, together, workload
from engine.lab.arrivals import tokens_of

EXAMPLES = (
    "poisson:rate=5,requests=400",
    "constant:rate=5,duration=20,tenants=3",
    "gamma:rate=5,cv=3,prefix=64,prefixes=4",
    "bursts:rate=5,requests=300,prompt=lognormal:200:1:2000,output=pareto:40:1.5",
    "batch:requests=50,prompt=10-20,output=exp:30",
    "conversations:rate=2,sessions=20",
    "agents:rate=2,runs=5",
)


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_same_text_and_seed_make_the_same_workload(text):
    first, again, other = workload(text, 3), workload(text, 3), workload(text, 4)
    assert first.arrivals == again.arrivals
    assert first.arrivals != other.arrivals
    assert source(source(text).spelled()).make(3).arrivals == first.arrivals


@pytest.mark.parametrize("text", EXAMPLES)
def test_requests_come_in_order_and_those_that_follow_stand_behind(text):
    made, seen = workload(text), set()
    roots = [one.at for one in made if not one.after]
    assert roots == sorted(roots)
    for one in made:
        assert set(one.after) <= seen
        seen.add(one.id)
    assert len(seen) == len(made) > 0


def gaps(text):
    return [b.at - a.at for a, b in itertools.pairwise(workload(text).arrivals)]


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("constant", 0.0)])
def test_rates_and_how_bursty_they_are(kind, cv):
    more = ",cv=3" if kind == "gamma" else ""
    found = gaps(f"{kind}:rate=20,requests=4000{more}")
    assert statistics.mean(found) == pytest.approx(1 / 20, rel=0.15)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(cv, rel=0.15, abs=1e-6)


def test_bursts_have_the_rate_that_is_asked_for_and_more_spread_than_poisson():
    found = gaps("bursts:rate=20,burst=10,busy=2,quiet=8,requests=20000")
    assert statistics.mean(found) == pytest.approx(1 / 20, rel=0.15)
    assert statistics.pstdev(found) / statistics.mean(found) > 1.3


@pytest.mark.parametrize(
    ("text", "mean"), [("100-300", 200), ("exp:200", 200), ("lognormal:200:1", 200), ("pareto:200:2.5", 200)]
)
def test_lengths_have_the_mean_that_is_written(text, mean):
    lengths = [one.output for one in workload(f"batch:requests=8000,output={text}")]
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.08)


def test_lengths_can_be_bounded():
    assert max(one.output for one in workload("batch:requests=500,output=pareto:200:1.2:400")) == 400


def test_arrivals_stay_where_they_are_when_lengths_change():
    one, other = (workload(f"poisson:rate=5,requests=50,prompt={length}") for length in ("10", "exp:99"))
    assert [a.at for a in one] == [a.at for a in other]


def test_prompts_share_the_beginnings_that_they_are_said_to():
    made = workload("poisson:rate=5,requests=60,prompt=5,prefix=20,prefixes=2")
    prompts = [tokens_of(one.prompt, 1000) for one in made]
    assert {len(prompt) for prompt in prompts} == {25}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 60


def test_a_shorter_piece_is_a_prefix_of_a_longer_one_and_tokens_stay_in_their_bounds():
    long = tokens_of([Piece(7, 500)], 300, first=100)
    assert tokens_of([Piece(7, 40)], 300, first=100) == long[:40]
    assert set(long) <= set(range(100, 300))
    assert len(set(long)) > 120
    assert tokens_of([Piece(7, 40), Piece(8, 3)], 300) == tokens_of([Piece(7, 40)], 300) + tokens_of([Piece(8, 3)], 300)


def test_tokens_are_splitmix64_by_hand():
    """So they are the same on every machine and with every numpy."""

    def mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    start = (7 * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) % 2**64
    expected = [mixed((start + (place + 1) * 0x9E3779B97F4A7C15) % 2**64) % 1000 for place in range(3)]
    assert tokens_of([Piece(7, 3)], 1000) == expected == [13, 1, 785]


def test_a_workload_that_makes_no_sense_is_refused():
    good = Arrival("a", 0.0, (Piece(1, 4),), 2)
    for wrong, words in (
        ([good, good], "twice"),
        ([Arrival("a", -1.0, (Piece(1, 4),), 2)], "time"),
        ([Arrival("a", 0.0, (), 2)], "no prompt"),
        ([Arrival("a", 0.0, (Piece(1, 4),), 0)], "wants 0"),
        ([good, Arrival("b", 0.0, (Piece(1, 4),), 1, after=("c",))], "not before it"),
        ([good, Arrival("b", 0.0, (Piece(1, 4),), 1, after=("a",), continues="c")], "does not follow"),
    ):
        with pytest.raises(ConfigError, match=words):
            Workload(wrong)


def test_several_workloads_at_once_keep_their_names_apart():
    both = together([workload("poisson:rate=1,requests=3"), workload("conversations:rate=1,sessions=2,turns=2")])
    assert len(both) == 7
    assert {one.tenant for one in both} == {"w1", "w2"}
    follower = next(one for one in both if one.after)
    assert follower.continues == follower.after[0] == "2.s0.0"


def test_twice_as_fast_is_half_the_time_but_for_pauses():
    made = workload("conversations:rate=1,sessions=5,turns=2")
    fast = made.faster(2.0)
    for before, after in zip(made, fast, strict=True):
        assert after.at == (before.at if before.after else before.at / 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("posson:rate=1", "did you mean 'poisson'"),
        ("poisson:rat=1", "did you mean 'rate'"),
        ("poisson", "rate is missing"),
        ("poisson:rate=0", "greater than 0"),
        ("poisson:rate=1,prompt=many", "is none of"),
        ("poisson:rate=1,prompt=pareto:9:1", "is none of"),
        ("poisson:rate", "no key=value"),
        ("batch:duration=3", "requests says"),
        ("mooncake:/nowhere", "No such file"),
    ],
)
def test_a_text_that_is_wrong_says_where(text, words):
    with pytest.raises(ConfigError, match=words):
        workload(text)


def test_every_source_says_what_it_is():
    for name, kind in sources().items():
        assert kind.__doc__, name
        assert all(field.description for field in kind.model_fields.values()), name


# ---- traces: samples made up for these tests, in the public layouts


def test_mooncake(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 27_000, "input_length": 1100, "output_length": 52, "hash_ids": [4, 5, 6]},
        {"timestamp": 27_500, "input_length": 1050, "output_length": 9, "hash_ids": [4, 5, 9]},
        {"timestamp": 30_000, "input_length": 12, "output_length": 1, "hash_ids": [2]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = workload(f"mooncake:{file}").arrivals
    assert [(one.at, one.new_tokens, one.output) for one in made] == [(0.0, 1100, 52), (0.5, 1050, 9), (3.0, 12, 1)]
    a, b = (tokens_of(one.prompt, 5000) for one in made[:2])
    assert a[:1024] == b[:1024]
    assert a[1024:1050] != b[1024:1050]
    assert [one.at for one in workload(f"mooncake:{file},skip=1,faster=5")] == [0.0, 0.5]
    assert len(workload(f"mooncake:path={file},limit=2")) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"timestamp": 1, "input_length": 1100, "output_length": 5, "hash_ids": [1]}',
            "request 1 .*must be 3 numbers",
        ),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5}', "no column 'hash_ids'"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 5, "hash_ids": [1]}', "timestamp"),
        ("[]", "no JSON object"),
        ("{", "request 1"),
        ("", "no request in it"),
    ],
)
def test_a_broken_mooncake_trace_says_where(tmp_path, line, words):
    file = tmp_path / "trace.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=words):
        workload(f"mooncake:{file}")


def test_azure(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:58.5000000,374,44\n"
        "2023-11-17 00:00:01.2500000,2896,1\n"
        "2023-11-17 00:00:02,10,3\n"
    )
    made = workload(f"azure:{file}").arrivals
    assert [(one.at, one.new_tokens, one.output) for one in made] == [(0.0, 374, 44), (2.75, 2896, 1), (3.5, 10, 3)]


@pytest.mark.parametrize("more", ["", ",Session ID,Elapsed time"])
def test_burstgpt(tmp_path, more):
    file = tmp_path / "burst.csv"
    rest = ",7,0.5" if more else ""
    file.write_text(
        f"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type{more}\n"
        f"5,ChatGPT,472,18,490,Conversation log{rest}\n"
        f"45,ChatGPT,1087,0,1087,Conversation log{rest}\n"
        f"118,GPT-4,417,276,693,API log{rest}\n"
    )
    made = workload(f"burstgpt:{file}").arrivals
    assert [(one.at, one.new_tokens, one.output) for one in made] == [(0.0, 472, 18), (113.0, 417, 276)]
    assert [one.new_tokens for one in workload(f"burstgpt:{file},model=GPT-4")] == [417]


def test_a_column_that_is_not_there_is_named(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,Context,GeneratedTokens\n1,2,3\n")
    with pytest.raises(ConfigError, match="no column 'ContextTokens'"):
        workload(f"azure:{file}")
