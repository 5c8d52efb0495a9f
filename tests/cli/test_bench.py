"""``engine bench``."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.plugins.frontends.openai import OpenAIFrontend

WORK = "poisson:rate=100,requests=20,prompt=20-60,output=3-9"
SIM = ("--executor", "sim", "--executor.step-ms", "1", "--in-process")
MODELLED = ("--simulated", "--model", "llama-3-8b", "--workload", WORK)
COMMAND = [sys.executable, "-c", "from engine.cli import main; main()", "bench"]


@pytest.fixture(scope="module")
def url(served):
    with served(OpenAIFrontend(), executor={"name": "sim", "step_ms": 1}) as url:
        yield url


def rows_of(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}


def test_an_engine_inside(here, tmp_path):
    flags = (*SIM, "--scheduler", "radix", "--kvcache", "radix", "--workload", WORK, "--slo", "e2e=100")
    code, out, err = here("bench", *flags, "--csv", str(tmp_path / "out.csv"))
    assert (code, err) == (0, "")
    assert "20 requests (20 length) in" in out
    assert "simulated" not in out
    assert re.search(r"goodput [\d.]+ requests/s: 100\.0% keep e2e=100 \(0 over e2e\)", out)
    rows = rows_of(out)
    assert rows["seconds"] == ["mean", "p50", "p90", "p95", "p99", "max"], "the table of engine simulate"
    assert {"queue", "ttft", "tpot", "itl", "e2e", "late"} <= set(rows)
    assert "sent late by" in out
    assert len([*csv.DictReader((tmp_path / "out.csv").read_text().splitlines())]) == 20


def test_the_engine_is_a_process_where_nothing_else_is_said(here):
    code, out, err = here("bench", "--executor", "sim", "--workload", WORK, "--warm-up", "2", "--json", "-")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {plugin["name"] for plugin in found["about"]["plugins"]} >= {"unified", "paged", "sim"}
    assert found["summary"]["ends"] == {"length": 20}, "a warm-up is not counted"
    assert len(found["requests"]) == 20
    assert found["curves"]["itl"][0] <= found["curves"]["itl"][-1]


@pytest.mark.parametrize("more", [(), ("--chat",)])
def test_a_server(here, url, more):
    flags = ("--workload", "conversations:rate=50,sessions=4,turns=2,prompt=9,output=4,pause=0.01")
    code, out, err = here("bench", "--url", url, *flags, *more, "--json", "-")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["summary"]["ends"] == {"length": 8}
    assert found["about"]["endpoint"]["owner"] == "sixhooks"
    assert found["summary"]["preemptions"] is None


def test_a_search(here, tmp_path):
    flags = (*MODELLED, "--max-running", "1", "--slo", "queue=0.05", "--find-rate", "--rate", "9", "--precision", "0.3")
    code, out, err = here("bench", *flags, "--json", str(tmp_path / "out.json"))
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())
    probes = re.findall(
        r"^ *([\d.]+) requests/s: *[\d.]+% keep the SLO, goodput [\d.]+: (meets|misses) it$", out, re.MULTILINE
    )
    assert [(float(rate), word == "meets") for rate, word in probes] == [
        (pytest.approx(one["rate"], abs=1e-3), one["met"]) for one in found["probes"]
    ]
    assert found["rate"] == max(one["rate"] for one in found["probes"] if one["met"])
    assert found["missed"] == min(one["rate"] for one in found["probes"] if not one["met"])
    assert found["missed"] <= found["rate"] * 1.3
    assert out.splitlines()[-1].endswith("miss it")


def test_a_matrix_is_kept_and_gone_on_with(here, tmp_path):
    out, lines = tmp_path / "out", tmp_path / "lines.csv"
    flags = (
        *MODELLED,
        "--slo",
        "ttft=1",
        "--matrix",
        "scheduler=unified,radix",
        "--out",
        str(out),
        "--csv",
        str(lines),
    )
    code, said, err = here("bench", *flags)
    assert (code, err) == (0, "")
    files = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert sorted(path.name for path in files) == [
        "cell-000-round-1-unified.json",
        "cell-001-round-1-radix.json",
        "settings.json",
    ]
    rows = [*csv.DictReader(lines.read_text().splitlines())]
    assert [(row["scheduler"], row["round"], row["died"]) for row in rows] == [("unified", "1", ""), ("radix", "1", "")]
    assert all(float(row["goodput"]) > 0 for row in rows)
    assert "[2/2] scheduler=radix:" in said
    assert "(kept)" not in said
    (gone,) = (path for path in files if "radix" in path.name)
    gone.unlink()
    code, said, err = here("bench", *flags)
    assert (code, said.count("(kept)")) == (0, 1), "what is missing is run, and nothing else"
    assert {path: path.stat().st_mtime_ns for path in files if path != gone} == {
        p: t for p, t in files.items() if p != gone
    }
    code, _, err = here("bench", *flags, "--seed", "7")
    assert code == 2
    assert "has results of other settings" in err
    assert "seed" in err
    assert len(err.splitlines()) == 1


def descendants(pid: int) -> set[int]:
    """Processes that it has started, and those that these have."""
    try:
        own = {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()
    return own.union(*(descendants(one) for one in own))


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found in /proc")
def test_who_is_killed_leaves_nothing_half_and_nobody_behind(here, tmp_path):
    out = tmp_path / "out"
    work = "poisson:rate=50,requests=100,prompt=20,output=3-9"
    flags = [*SIM[:-1], "--workload", work, "--matrix", "max-running=3,4", "--out", str(out)]
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not [*out.glob("cell-000*")]:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        children: set[int] = set()
        while len(children) < 2:  # who runs the second cell, and its engine
            assert time.monotonic() < deadline
            children = descendants(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    first = (out / "cell-000-round-1-3.json").stat().st_mtime_ns
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "they end with whoever wanted the cell"
        time.sleep(0.05)
    assert not [*out.glob("cell-001*")]
    code, said, err = here("bench", *flags)
    assert (code, err) == (0, "")
    assert "[1/2] max_running=3" in said
    assert said.count("(kept)") == 1
    assert (out / "cell-000-round-1-3.json").stat().st_mtime_ns == first
    assert json.loads((out / "cell-001-round-1-4.json").read_text())["measured"]["summary"]["ends"] == {"length": 100}


def test_one_that_dies_does_not_end_the_others(here, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    flags = (
        "--in-process",
        "--workload",
        WORK,
        "--matrix",
        "executor=bench_dying:Dies,sim",
        "--out",
        str(tmp_path / "out"),
    )
    code, said, err = here(
        "bench", *flags, "--report", str(tmp_path / "page.html"), "--json", str(tmp_path / "all.json")
    )
    assert (code, err) == (0, "")
    assert "[1/2] executor=bench_dying:Dies: died: its process ended by signal 9" in said
    assert re.search(r"\[2/2\] executor=sim: [\d.]+ requests/s", said)
    cells = json.loads((tmp_path / "all.json").read_text())["cells"]
    assert [bool(cell.get("died")) for cell in cells] == [True, False]
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from engine.lab.jobs import Job
    from engine.lab.report import page

    assert "ended by signal 9" in page(Job(), cells)


def test_a_matrix_as_json_has_nothing_beside_it(here):
    code, out, err = here("bench", *MODELLED, "--matrix", "rate=50", "--json", "-")
    assert code == 0
    assert [cell["choice"] for cell in json.loads(out)["cells"]] == [{"rate": "50"}]
    assert err.startswith("[1/1] rate=50: ")


def test_a_page_with_plots(here, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    page = tmp_path / "page.html"
    flags = (*MODELLED, "--slo", "ttft=1,itl=0.05", "--matrix", "rate=50,100", "--report", str(page))
    assert here("bench", *flags)[0] == 0
    text = page.read_text()
    assert text.count("<svg") == 9, "bars, five against the rate, three spreads"
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", text.replace("xlink:href", "href")), "nothing is loaded"
    assert "<td>" in text
    names = re.findall(r'<(?:clipPath|path|g) id="([^"]+)"', text)
    clips = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(set(clips)) == len(clips), "plots do not cut each other off"
    assert names
    single = tmp_path / "single.html"
    assert here("bench", *MODELLED, "--report", str(single))[0] == 0
    assert single.read_text().count("<svg") == 3


def test_a_report_that_cannot_be_drawn_is_refused_before_anything_is_measured(here, monkeypatch):
    monkeypatch.setattr("engine.lab.report.find_spec", lambda name: None)
    code, out, err = here("bench", *SIM, "--workload", WORK, "--report", "/nowhere/page.html")
    assert (code, out) == (2, "")
    assert err == "error: a report needs matplotlib: pip install 'sixhooks[report]'\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*SIM, "--find-rate"), "give --slo"),
        ((*SIM, "--workload", "poison:rate=1"), "did you mean 'poisson'"),
        ((*SIM, "--slo", "ttfd=1"), "no limit such as"),
        ((*SIM, "--matrix", "schedular=radix"), "did you mean 'scheduler'"),
        ((*SIM, "--executor.step-mx", "1"), "no option 'step_mx'"),
        (("--url", "http://127.0.0.1:1"), "no server answers"),
        (("--url", "http://127.0.0.1:1", "--scheduler", "radix"), "--scheduler: the server that --url names"),
        (("--url", "http://127.0.0.1:1", "--simulated"), "one of them"),
        (("--url", "http://127.0.0.1:1", "--extra-body", "[]"), "no object"),
        (("--simulated", "--gpu", "h10", "--workload", WORK), "did you mean 'h100'"),
        (("--simulated", "--workload", WORK, "--matrix", "executor=sim"), "executor cannot be chosen here"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(here, flags, words):
    code, _, err = here("bench", *flags)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def documented() -> list[list[str]]:
    """The commands of docs/bench.md."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [shlex.split(block.replace("\\\n", " "))[1:] for block in blocks]


@pytest.mark.parametrize("number", range(3))
def test_the_commands_of_the_page_run(here, number):
    commands = documented()
    assert len(commands) == 3
    few = ["--num-requests", "10", "--matrix", "scheduler=radix"] if number == 2 else ["--num-requests", "20"]
    given = [part for part in commands[number] if number < 2 or not part.startswith("scheduler=")]
    if number == 2:  # one axis less, and less of it
        given.remove("--matrix")
        given[given.index("--rounds") + 1] = "1"
    code, out, err = here(*given, *few)
    assert (code, err) == (0, "")
    assert "requests/s" in out
