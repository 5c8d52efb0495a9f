"""A recorded run is decided anew bit by bit, whatever the plugins; a log says nothing of what was said."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import msgspec
import pytest
from record_kit import ON, VOCABULARY, Crowd, busy_run, faulty_run, written

from engine.core import Policy, SamplingParams, Wait, hookimpl
from engine.core.errors import ConfigError, EngineError
from engine.core.record.desk import RecordOptions
from engine.core.record.lines import Add, Commit, End, Gap, Idle, Plan, Run, decode, encode
from engine.core.record.notes import is_number
from engine.core.record.pages import Unveiling, Veil, digests_of, group_of
from engine.core.record.reading import NotALog, is_log, parse, read, spelled_out
from engine.core.replay.log import OF_WORK, Setup, replay
from engine.core.replay.report import NotReplayable
from engine.plugins.executors.sim import SimExecutor
from engine.plugins.schedulers.unified import UnifiedScheduler
from engine.testing import make_core

BOTH = ("unified", "radix")
BUSY_RADIX = {
    "policy": "lpm",
    "enable_priority_scheduling": True,
    "chunked_prefill_size": 48,
    "enable_mixed_chunk": True,
}


class Ticking:
    """A clock that goes on whenever it is read: what is decided by time is decided by the very reading."""

    def __init__(self, tick: float = 1e-4) -> None:
        self.now, self.tick = 100.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


# ---- decided anew


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize("scheduler", BOTH)
def test_a_busy_log_is_decided_equally(scheduler, kvcache, overlap, tmp_path):
    core = busy_run(2000, scheduler=scheduler, kvcache=kvcache, overlap=overlap, clock=Ticking(1e-3))
    counters = core.counters.flat()
    for name in ("finished_stop", "finished_length", "finished_abort", "finished_timeout", "evicted_pages"):
        assert counters[name] > 5, name
    assert counters["preemptions"] or scheduler == "radix"
    log = written(core, tmp_path / "busy.jsonl")
    report = replay(log, "busy")
    assert report.equal, "\n".join(report.divergence.lines())
    assert report.steps == counters["steps"] >= 2000
    assert sum(len(plan.partial) for plan in log.plans) > 20  # prompts were cut


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kvcache", ["paged", "radix"])
@pytest.mark.parametrize("scheduler", BOTH)
def test_drafts_and_faults_are_decided_equally(scheduler, kvcache, overlap, page_size, tmp_path):
    setting = {"page_size": page_size, "num_pages": 64 // page_size}
    log = written(faulty_run(scheduler=scheduler, kvcache=kvcache, overlap=overlap, **setting), tmp_path / "log.jsonl")
    report = replay(log, "faulty")
    assert report.equal, "\n".join(report.divergence.lines())
    assert report.steps > 30


@pytest.mark.parametrize(
    ("scheduler", "options", "policies"),
    [
        ("radix", BUSY_RADIX, ()),
        ("radix", {"policy": "dfs-weight", "waiting_timeout": 0.4, "running_timeout": 0.3}, ()),
        ("radix", {"policy": "random", "seed": 3, "bound_starvation": True}, ("soft-retention",)),
        ("radix", {"policy": "routing-key"}, ("random-leaf",)),
        ("unified", {"policy": "priority"}, ("early-reject", "least-recompute")),
        ("unified", {}, ("deadline", "reuse-forecast")),
        ("unified", {"max_adapters": 1}, ("fair-share",)),
        ("unified", {"watermark": 0.1}, ("shortest-predicted", "past-future")),
        ("unified", {}, ("dlpm",)),
        ("unified", {}, ("k-lpm",)),
    ],
)
def test_whatever_decides_by_time_tenant_or_prefix_decides_the_same(scheduler, options, policies, tmp_path):
    core = busy_run(
        400, scheduler=scheduler, kvcache="radix", policies=policies, scheduler_options=options, clock=Ticking(1e-3),
        page_size=1 if options is BUSY_RADIX else 16, num_pages=500 if options is BUSY_RADIX else 40,
    )  # fmt: skip
    assert not core.hooks.faults()
    report = replay(written(core, tmp_path / "log.jsonl"), "policies")
    assert report.equal, "\n".join(report.divergence.lines())


def test_a_full_queue_displaces_in_the_replay_too(tmp_path):
    core = busy_run(
        600, scheduler="radix", scheduler_options={"enable_priority_scheduling": True}, max_waiting=4, max_running=3,
        limits={"max_waiting_tokens": 300},
    )  # fmt: skip
    log = written(core, tmp_path / "log.jsonl")
    displaced = [end for end in log.ends.values() if end.finish == "abort" and end.n not in log.aborts]
    assert displaced
    assert replay(log, "full").equal


def test_other_weights_are_part_of_it(tmp_path):
    executor = SimExecutor(SimExecutor.Options(vocab_size=VOCABULARY))
    core = make_core(executor=executor, record=ON)
    for epoch in range(3):
        for _ in range(2):
            core.add(list(range(20)), SamplingParams(max_tokens=6))
            core.step()
            core.step()
        core.update_weights({"epoch": epoch}, running="recompute" if epoch else "abort")
    while core.has_work:
        core.step()
    log = written(core, tmp_path / "log.jsonl")
    assert replay(log, "weights").equal


# ---- where decisions part


class Slips(UnifiedScheduler):
    """Decides as ``unified``, but admits nobody in one step."""

    slip = 0

    @hookimpl
    def plan(self, step):
        if step.index != self.slip:
            return super().plan(step)
        self._serve_running(step)
        return step.seal()


@pytest.mark.parametrize("seed", range(3))
def test_a_seeded_divergence_is_found_at_its_step(seed, tmp_path):
    scheduler = Slips()
    core = busy_run(900, seed=seed, scheduler=scheduler, clock=Ticking(1e-3))
    log = written(core, tmp_path / "plain.jsonl")
    assert replay(log, "plain").equal
    admissions = [plan.step for plan in log.plans if plan.admitted and plan.step > 200]
    scheduler = Slips()
    scheduler.slip = random.Random(seed).choice(admissions)
    log = written(busy_run(900, seed=seed, scheduler=scheduler, clock=Ticking(1e-3)), tmp_path / "slipped.jsonl")
    report = replay(log, "slipped")
    assert report.divergence is not None
    assert report.divergence.step == scheduler.slip
    assert report.steps == scheduler.slip - 1
    assert "! admitted" in "\n".join(report.divergence.lines())


@pytest.mark.parametrize("field", ["rows", "waits", "queue", "available", "admitted", "rest", "evicted"])
def test_a_spoilt_log_is_told_with_its_step(field, tmp_path):
    log = written(busy_run(300), tmp_path / "log.jsonl")
    at = next(number for number, line in enumerate(log.lines) if isinstance(line, Plan) and getattr(line, field))
    spoilt = log.lines[at]
    other = {"rows": [], "counts": [], "rest": "delay", "available": 1, "evicted": 99}.get(field, [])
    changes = {"counts": []} if field == "rows" else {}
    log.lines[at] = msgspec.structs.replace(spoilt, **{field: other}, **changes)
    report = replay(log, "spoilt")
    assert report.divergence is not None
    assert report.divergence.step == spoilt.step
    assert f"! {field}" in "\n".join(report.divergence.lines())


def test_a_finish_that_was_not_decided_is_told(tmp_path):
    log = written(busy_run(100), tmp_path / "log.jsonl")
    at = next(
        n for n, line in enumerate(log.lines) if isinstance(line, Commit) and ("length" in dict(line.finished).values())
    )
    step = log.lines[at].step
    log.lines[at] = msgspec.structs.replace(log.lines[at], finished=[])
    assert replay(log, "spoilt").divergence.step == step


def test_another_scheduler_parts_and_reasons_alone_do_not(tmp_path):
    log = written(busy_run(300), tmp_path / "log.jsonl")
    setup = Setup.of(log.header.config)
    assert replay(log, "same", setup, OF_WORK).equal
    other = msgspec.structs.replace(
        log.header, config={**log.header.config, "scheduler": {"name": "radix", "options": {}}}
    )
    assert replay(log, "other", Setup.of(other.config), OF_WORK).divergence is not None


# ---- what is not in it


def test_nothing_of_what_was_said_is_in_a_log(tmp_path):
    secret = [4321 + at for at in range(64)]
    texts = []
    for turn in range(2):
        core = make_core(executor=SimExecutor(SimExecutor.Options(vocab_size=VOCABULARY)), page_size=16, record=ON)
        for other in (0, 1):
            core.add(
                [*secret, other], SamplingParams(max_tokens=40), salt="the salt",
                metadata={"user": "a name", "tenant": "acme", "deadline_in": "2.5", "nested": {"a": "b"}, "flag": True},
            )  # fmt: skip
        while core.has_work:
            core.step()
        written(core, tmp_path / f"{turn}.jsonl")
        texts.append((tmp_path / f"{turn}.jsonl").read_text())
    for text in texts:
        for hidden in ("432", "a name", "the salt", 'nested":{', "'b'"):
            assert hidden not in "\n".join(line for line in text.splitlines()[1:] if '"e":"add"' in line)
    first, second = (next(decode(line) for line in text.splitlines() if '"e":"add"' in line) for text in texts)
    assert isinstance(first, Add)
    assert isinstance(second, Add)
    assert first.metadata["tenant"] == "acme"
    assert first.metadata["deadline_in"] == "2.5"
    assert first.metadata["flag"] is True
    assert first.metadata["user"].startswith("~")
    # Another log has another secret: nobody can compare, or try texts.
    assert len(first.pages) == len(second.pages) > 20
    assert not set(digests_of(first.pages)) & set(digests_of(second.pages))


def test_equal_beginnings_stay_equal_and_nothing_else():
    veil, unveiling = Veil(b"k" * 32, 4), Unveiling(4)

    def digests(tokens):
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        return digests_of(veil.pages(packed, veil.root)[0])

    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 9]
    c = [5, 6, 7, 8, 5, 6, 7, 8]
    seen = [unveiling.tokens(digests(tokens), len(tokens)) for tokens in (a, b, c, a)]
    assert list(map(len, seen)) == [9, 8, 8, 9]
    assert seen[0][:4] == seen[1][:4]
    assert seen[0][4:8] != seen[1][4:8]
    assert seen[0][:8] == seen[3][:8]
    assert seen[0][8] != seen[3][8]  # of a torn group nothing is known
    assert seen[2][:4] != seen[2][4:8]  # the same group behind another beginning


@pytest.mark.parametrize(("page_size", "group"), [(1, 1), (16, 16), (24, 8), (64, 32), (100, 4)])
def test_a_group_is_part_of_a_page_and_of_what_orders_compare(page_size, group):
    assert group_of(page_size) == group


@pytest.mark.parametrize(("text", "number"), [("2.5", True), ("-1e3", True), ("soon", False), ("", False)])
def test_text_that_is_a_number_is_told(text, number):
    assert is_number(text) is number


def test_words_that_are_no_unicode_spoil_no_log(tmp_path):
    class Mutters(Policy):
        name = "mutters"

        @hookimpl
        def admit(self, step, request):
            return Wait("\ud800") if step.index < 3 else None

    core = make_core(record=ON, policies=[Mutters()])
    core.add([1, 2, 3], SamplingParams(max_tokens=2))
    while core.has_work:
        core.step()
    log = written(core, tmp_path / "log.jsonl")
    assert log.plans[0].waits == [(1, "policy", "\\ud800")]


# ---- how it is written


def test_steady_steps_cost_one_line(tmp_path):
    core = make_core(num_pages=300, max_model_len=900, record=ON)
    for _ in range(4):
        core.add([1, 2, 3], SamplingParams(max_tokens=200))
    while core.has_work:
        core.step()
    path = tmp_path / "log.jsonl"
    log = written(core, path)
    kinds = [decode(line) for line in path.read_bytes().splitlines()]
    runs = [line for line in kinds if isinstance(line, Run)]
    assert len(runs) == 1
    assert len(runs[0].t) > 190
    assert len([line for line in kinds if isinstance(line, Plan)]) < 5
    assert len(log.plans) == core.counters.steps
    assert replay(log, "steady").equal


def test_steps_that_wait_for_something_are_runs_too(tmp_path):
    """A parked request keeps the loop going: plans of nothing, each followed by ``idle``."""
    core = make_core(record=ON)
    core.add([1, 2, 3], SamplingParams(max_tokens=2), parked_on=["adapter"], request_id="late")
    for _ in range(20):
        core.step()
    core.ready("late", "adapter")
    while core.has_work:
        core.step()
    path = tmp_path / "log.jsonl"
    log = written(core, path)
    runs = [line for line in map(decode, path.read_bytes().splitlines()) if isinstance(line, Run)]
    assert [run.idle for run in runs] == [True]
    assert sum(isinstance(line, Idle) for line in log.lines) >= 20
    assert replay(log, "parked").equal


def test_runs_are_spelled_out_as_the_steps_that_they_were():
    plan = Plan(3, 1.0, rows=[1, 2], counts=1, admitted=[(2, 0)], queue=[1, 3], available=9)
    run = Run(4, [2.0, 3.0], [0.1, 0.1], [2.5, 3.5], [0.2, 0.2], [8, 7], [0, 1], lag=1, idle=True)
    first, *steps, last = spelled_out([plan, run, Plan(6, 4.0, available=5)])
    assert first.counts == [1, 1]
    assert [type(line) for line in steps] == [Plan, Commit, Idle] * 2
    assert [line.step for line in steps if isinstance(line, Commit)] == [3, 4]
    assert steps[3] == Plan(5, 3.0, 0.1, rows=[1, 2], counts=[1, 1], queue=[1, 3], available=7, evicted=1)
    assert last == Plan(6, 4.0, rows=[1, 2], counts=[1, 1], queue=[1, 3], available=5)


def test_lines_come_back_as_they_were():
    for line in (Add(n=1, id="a", t=0.1, prompt=3), End(1, 0.30000000000000004, "stop"), Gap(4), Idle()):
        assert decode(encode(line)) == line
    with pytest.raises(msgspec.DecodeError):
        decode(b'{"e":"nonsense"}')


# ---- where it is kept


def test_a_ring_forgets_the_oldest_and_says_so(tmp_path):
    core = busy_run(1500, record_mb=1)
    status = core.record.status()
    assert status["dropped_lines"] > 100
    assert not status["whole"]
    assert status["bytes"] <= status["most_bytes"]
    log = written(core, tmp_path / "log.jsonl")
    assert not log.header.whole
    missing = {n for plan in log.plans for n in plan.rows or ()} - set(log.adds)
    assert not missing  # whose coming was forgotten is told all the same
    with pytest.raises(NotReplayable, match="does not begin with the engine"):
        replay(log, "torn")


def test_it_is_switched_on_and_off_while_requests_run(tmp_path):
    core = make_core(num_pages=100)
    assert core.record.status() == {"on": False}
    with pytest.raises(ConfigError, match="engine record on"):
        core.record.write(tmp_path / "no.jsonl")
    for number in range(3):
        core.add([1, 2, number], SamplingParams(max_tokens=20), request_id=f"old-{number}")
    core.step()
    assert core.record.on()["on"]
    name = core.record.status()["id"]
    assert core.record.on()["id"] == name  # it goes on
    core.add([7, 8], SamplingParams(max_tokens=3), request_id="new")
    for _ in range(8):
        core.step()
    core.record.write(tmp_path / "log.jsonl")
    log = read(tmp_path / "log.jsonl")
    assert [add.id for add in log.adds.values()] == ["old-0", "old-1", "old-2", "new"]
    assert [add.before is not None for add in log.adds.values()] == [True, True, True, False]
    assert log.ends[4].finish == "length"
    assert {log.ends[n].finish for n in (1, 2, 3)} == {""}
    assert core.record.off() == {"on": False}
    core.step()
    assert core.record.on()["id"] != name
    core.close()


def test_files_follow_each_other_and_the_oldest_go(tmp_path):
    options = RecordOptions(on=True, folder=str(tmp_path / "logs"), file_mb=1, files=3)
    core = busy_run(300, record=options)
    core.close()
    assert replay(read(tmp_path / "logs"), "files").equal
    [file] = sorted((tmp_path / "logs").iterdir())
    core = make_core(
        executor=SimExecutor(SimExecutor.Options(vocab_size=VOCABULARY)), num_pages=40, page_size=16,
        record=RecordOptions(on=True, folder=str(tmp_path / "more"), files=3),
    )  # fmt: skip
    files = core.record._files
    files._most = 50_000
    crowd = Crowd(core, random.Random(5))
    for _ in range(400):
        crowd.turn()
        core.step()
    core.close()
    names = sorted(path.name for path in (tmp_path / "more").iterdir())
    assert len(names) == 3
    assert names[0].endswith(".jsonl")
    log = read(tmp_path / "more")
    assert len(log.adds) > 10
    assert log.inexact.startswith("it begins with part")
    assert log.plans[-1].step == core.counters.steps
    with pytest.raises(NotALog, match="belongs to log"):
        read([file, tmp_path / "more"])
    (tmp_path / "more" / names[1]).unlink()
    with pytest.raises(NotALog, match="is missing"):
        read(tmp_path / "more")


def test_a_disk_that_fails_ends_the_log_and_not_the_engine(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be recorded"):
        make_core(record=RecordOptions(on=True, folder=str(tmp_path / "file" / "logs")))
    core = make_core(record=RecordOptions(on=True, folder=str(tmp_path / "logs")))
    files = core.record._files
    files._most = 1
    (tmp_path / "logs").chmod(0o700)
    for path in (tmp_path / "logs").iterdir():
        path.unlink()
    (tmp_path / "logs").rmdir()
    core.add([1, 2, 3], SamplingParams(max_tokens=5))
    while core.has_work:
        core.step()
    files.close()
    assert "No such file" in core.record.status()["file_error"]
    core.close()


def test_a_disk_that_is_too_slow_leaves_a_gap(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.core.record.writing.MOST_BEHIND", 5)
    core = make_core(record=RecordOptions(on=True, folder=str(tmp_path)), num_pages=200)
    files = core.record._files
    size = files._queue.qsize
    files._queue = Stalled(files._queue)
    for number in range(10):
        core.add([number], SamplingParams(max_tokens=2))
        core.step()
    files._queue.stalled = False
    while core.has_work or size():
        core.step()
        core.add([1], SamplingParams(max_tokens=1))
        if core.counters.steps > 200:
            break
    core.close()
    log = read(tmp_path)
    assert any(isinstance(line, Gap) and line.lines > 3 for line in log.lines)
    assert "the disk was too slow" in log.inexact


class Stalled:
    """A queue that seems to be full."""

    def __init__(self, queue) -> None:
        self._queue, self.stalled = queue, True

    def qsize(self) -> int:
        return 10**6 if self.stalled else self._queue.qsize()

    def __getattr__(self, name):
        return getattr(self._queue, name)


def test_what_is_no_log_is_told(tmp_path):
    log = tmp_path / "log.jsonl"
    written(busy_run(30), log)
    assert is_log(log)
    zipped = tmp_path / "log.jsonl.gz"
    zipped.write_bytes(gzip.compress(log.read_bytes()))
    assert is_log(zipped)
    assert read(zipped).plans == read(log).plans == parse(log.read_bytes()).plans
    log.write_bytes(log.read_bytes()[:-10])  # whoever wrote it was killed
    assert "in the middle of a line" in read(log).inexact
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"a": 1}))
    assert not is_log(other)
    with pytest.raises(NotALog, match="is no decision log"):
        read(other)
    with pytest.raises(NotALog, match="no decision log"):
        read([])
    other.write_bytes(log.read_bytes().splitlines()[0].replace(b"record-1", b"record-9") + b"\n")
    with pytest.raises(NotALog, match="format 'sixhooks-record-9'"):
        read(other)
    other.write_bytes(log.read_bytes().splitlines()[1] + b"\n")
    with pytest.raises(NotALog, match="does not begin"):
        read(other)


def test_a_log_of_plugins_that_are_not_here_says_so(tmp_path):
    log = written(busy_run(20), tmp_path / "log.jsonl")
    log.header.config["policies"] = [{"name": "nobody", "options": {}}]
    with pytest.raises(NotReplayable, match="unknown policy 'nobody'"):
        replay(log, "plugins")
    del log.header.config["limits"]
    with pytest.raises(NotReplayable, match="header"):
        replay(log, "plugins")


def test_connectors_make_a_log_inexact(tmp_path):
    from engine.testing import FaultyConnector

    core = make_core(connectors=[FaultyConnector(seed=1)], record=ON)
    core.record.write(Path(tmp_path / "log.jsonl"))
    core.close()
    with pytest.raises(NotReplayable, match="connectors"):
        replay(read(tmp_path / "log.jsonl"), "connected")


def test_questions_that_cannot_be_answered_are_told():
    core = make_core()
    with pytest.raises(EngineError, match="cannot be asked"):
        core.record.ask("nonsense", {})
    with pytest.raises(EngineError, match="no job 7"):
        core.record.done(7)
    core.close()
