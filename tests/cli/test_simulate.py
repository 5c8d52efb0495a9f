"""``engine simulate``."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

WORK = "poisson:rate=20,requests=40,prompt=50-300,output=5-30"


def test_a_table_for_people(here):
    code, out, err = here(
        "simulate", "--model", "llama-3-8b", "--gpu", "a100", "--workload", WORK, "--slo", "ttft=1.0,itl=0.05"
    )
    assert code == 0, err
    assert "40 requests (40 length)" in out
    assert re.search(r"goodput [\d.]+ requests/s: 100\.0% keep ttft=1,itl=0\.05 \(0 over ttft, 0 over itl\)", out)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert rows["seconds"] == ["mean", "p50", "p90", "p95", "p99", "max"]
    assert all(float(value) > 0 for value in rows["ttft"])
    assert err == "", "no bar where nobody looks"


def test_results_for_programs(here, tmp_path):
    flags = ("--workload", WORK, "--seed", "5", "--scheduler", "radix", "--kvcache", "radix", "--num-pages", "500",
             "--policy", "fair-share", "--scheduler.policy", "lpm", "--executor.host-ms", "2.5", "--overlap", "true",
             "--csv", str(tmp_path / "out.csv"))  # fmt: skip
    code, out, err = here("simulate", *flags, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    plugins = {plugin["role"]: plugin for plugin in found["about"]["plugins"]}
    assert (plugins["scheduler"]["name"], plugins["kvcache"]["name"]) == ("radix", "radix")
    assert plugins["policy"]["name"] == "fair-share"
    assert plugins["scheduler"]["options"]["policy"] == "lpm"
    assert plugins["executor"]["options"]["host_ms"] == 2.5
    assert found["about"]["loop"] == "overlap"
    assert found["about"]["limits"]["num_pages"] == 500
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["id"] for row in rows] == [one["id"] for one in found["requests"]]
    again = json.loads(here("simulate", *flags, "--json", "-")[1])
    assert again["summary"] == found["summary"]


def test_several_engines_and_workloads(here, tmp_path):
    out = tmp_path / "out.json"
    flags = ("--replicas", "3", "--prefill-replicas", "2", "--router", "prefix", "--json", str(out))
    code, told, err = here("simulate", "--workload", WORK, "--workload", "agents:rate=5,runs=2,output=9", *flags)
    assert code == 0, err
    found = json.loads(out.read_text())
    assert {one["engine"] for one in found["engines"]} == {"prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"}
    assert {one["tenant"] for one in found["requests"]} == {"w1", "run0", "run1"}
    assert "handoff" in told


def test_a_log_is_written_fitted_and_simulated_again(here, tmp_path):
    log, cost = str(tmp_path / "engine-0"), str(tmp_path / "cost.json")
    assert here("simulate", "--workload", WORK, "--num-pages", "700", "--record-dir", str(tmp_path))[0] == 0
    code, out, err = here("simulate", "--fit", log, "--save-cost", cost)
    assert code == 0, err
    assert re.match(r"fitted to \d+ steps \(0 left out\): off by 0\.\d% a step", out)
    for flags in (("--fit", log), ("--cost", cost)):
        code, out, err = here("simulate", *flags, "--workload", f"log:{log}", "--json", str(tmp_path / "out.json"))
        assert code == 0, err
        found = json.loads((tmp_path / "out.json").read_text())
        assert found["summary"]["requests"] == 40
        assert found["about"]["limits"]["num_pages"] == 700, "as it was logged"
        assert found["about"]["model"]["cost"]["kind"] == "fitted"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--workload says what arrives"),
        (("--workload", "poison:rate=1"), "did you mean 'poisson'"),
        (("--workload", WORK, "--gpu", "h10"), "did you mean 'h100'"),
        (("--workload", WORK, "--model", "lama-3-8b"), "did you mean 'llama-3-8b'"),
        (("--workload", WORK, "--slo", "ttfd=1"), "no limit such as"),
        (("--workload", WORK, "--router", "best"), "there are round-robin"),
        (("--workload", WORK, "--executor.host-mx", "1"), "no option 'host_mx'"),
        (("--workload", WORK, "--dtype", "float64"), "dtype"),
        (("--workload", WORK, "--cost", "/nowhere.json"), "No such file"),
        (("--save-cost", "x"), "give it a log"),
    ],
)
def test_what_is_wrong_is_one_line(here, flags, words):
    code, _, err = here("simulate", *flags)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def documented():
    """The commands of docs/lab.md that need no file, and the one of the README, made short."""
    root = Path(__file__).resolve().parents[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", (root / "docs" / "lab.md").read_text(), re.DOTALL | re.MULTILINE)
    commands = [" ".join(block.replace("\\\n", " ").split()) for block in blocks]
    (short,) = re.findall(r"`(engine simulate [^`]+)`", (root / "README.md").read_text())
    return [*commands, short.replace("rate=8", "rate=8,requests=20")]


@pytest.mark.parametrize("number", range(3))
def test_the_commands_of_the_documents_run(here, number):
    commands = documented()
    assert len(commands) == 3
    code, out, err = here(*commands[number].split()[1:])
    assert code == 0, err
    assert "requests/s" in out


def test_the_tables_of_the_page_are_what_there_is():
    from engine.lab import sources
    from engine.lab.gpus import GPUS
    from engine.lab.routers import ROUTERS

    page = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)(?::FILE)?` \| [^|\n]*\|[^|\n]*\|", page, re.MULTILINE)) == set(sources())
    assert set(re.findall(r"^\| `([\w-]+)` \| [^|]*\|$", page, re.MULTILINE)) == set(ROUTERS)
    told = re.search(r"`--gpu` is one of (.*?)\. `--model`", page, re.DOTALL)[1]
    assert set(re.findall(r"`([\w-]+)`", told)) == set(GPUS)
