"""The documents say what is true: commands exist, tables match, code runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from engine.core import EngineConfig, hookspecs, load_config
from engine.core.hooks import HOOKS
from engine.core.native import why_not
from engine.core.plan import Why
from engine.core.registry import Registry

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
ALL = {"README.md": README, **DOCS}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_table_of_plugins_is_what_is_installed():
    rows = {tuple(row) for row in re.findall(r"^\| (\w+) \| `([\w-]+)`", README, re.MULTILINE)}
    installed = {(line.role, line.name) for line in Registry().listing() if line.distribution == "sixhooks"}
    assert rows == installed
    for line in Registry().listing():
        if line.distribution == "sixhooks":
            for alias in line.aliases:
                assert f"`{alias}`" in README


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"serve", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_links_lead_somewhere():
    for name, text in ALL.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (folder / target).exists(), f"{name}: {target}"


def test_the_ten_line_plugin_is_the_example():
    (shown,) = [block for block in blocks(README, "python") if "ShortestFirst" in block]
    example = (ROOT / "examples/plugins/shortest-first/shortest_first.py").read_text()
    assert shown.strip() == example.split('"""\n\n', 1)[1].strip()


@pytest.mark.parametrize(
    ("name", "number"),
    [(n, i) for n, text in DOCS.items() if n != "contract.md" for i in range(len(blocks(text, "python")))],
)
def test_python_in_the_docs_runs(name, number):
    code = blocks(DOCS[name], "python")[number]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_toml_in_the_docs_is_accepted(tmp_path):
    for name, text in ALL.items():
        for block in blocks(text, "toml"):
            tomllib.loads(block)
            file = tmp_path / "engine.toml"
            file.write_text(block)
            assert isinstance(load_config(file=file).config, EngineConfig), name


def test_the_benchmark_of_the_docs_runs():
    command = [sys.executable, "benchmarks/hook_cost.py", "--running", "4", "--rounds", "1"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("do-nothing") == done.stdout.count(" five ") == 4
    assert "pluggy dispatch" in done.stdout


def test_the_benchmark_of_the_policies_runs_and_each_installed_policy_is_in_it_and_in_the_docs():
    done = subprocess.run(
        [sys.executable, "benchmarks/policies.py", "--quick"], check=True, cwd=ROOT, capture_output=True, text=True
    )
    measured = re.findall(r"^([\w-]+) +\S.*?  +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    installed = {line.name for line in Registry().listing() if (line.role, line.distribution) == ("policy", "sixhooks")}
    assert {name for name, *_ in measured} == installed
    assert set(re.findall(r"^\| `([\w-]+)`", DOCS["policies.md"], re.MULTILINE)) == installed


def test_the_options_of_the_policies_are_all_in_the_docs():
    for line in Registry().listing():
        if (line.role, line.distribution) == ("policy", "sixhooks"):
            (row,) = re.findall(rf"^\| `{line.name}`.*$", DOCS["policies.md"], re.MULTILINE)
            for option in Registry().select("policy", line.name).cls.Options.model_fields:
                assert f"`{option}`" in row, f"{line.name}: {option}"


def test_the_scheduler_benchmark_of_the_docs_runs():
    """Here it has vLLM beside it only where somebody installed that."""
    command = [sys.executable, "benchmarks/scheduler.py", "--quick"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    rows = re.findall(r"^(decode|queue|admission|preemption)\b.* ours +[\d.]+ +[\d.]+ ", done.stdout, re.MULTILINE)
    assert {name: rows.count(name) for name in rows} == {"decode": 2, "queue": 4, "admission": 2, "preemption": 2}
    if importlib.util.find_spec("vllm") is None:
        assert "vLLM cannot be imported here: ours alone" in done.stdout
    else:
        assert done.stdout.count(" vllm ") == len(rows)


def test_the_radix_benchmark_runs():
    """Here it has SGLang beside it only where somebody installed that."""
    command = [sys.executable, "benchmarks/radix.py", "--quick"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=300)
    rows = re.findall(
        r"^(match|insert|evict|lpm|dfs-weight|admission|decode)\b.* ours +[\d.]+ ", done.stdout, re.MULTILINE
    )
    assert {name: rows.count(name) for name in rows} == {
        "match": 8, "insert": 2, "evict": 4, "lpm": 6, "dfs-weight": 2, "admission": 2, "decode": 1
    }  # fmt: skip
    assert len(re.findall(r"^memory, page .* ours: \d+ bytes a node$", done.stdout, re.MULTILINE)) == 2
    if importlib.util.find_spec("sglang") is None:
        assert "SGLang cannot be imported here: ours alone" in done.stdout
    else:
        assert done.stdout.count(" sglang ") == len(rows) - 1


@pytest.mark.model
def test_the_embedding_example_of_the_readme_runs():
    (code,) = [block for block in blocks(README, "python") if "LLM" in block]
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert "Paris" in done.stdout


def test_every_hook_is_documented_with_its_signature():
    assert set(HOOKS) == {name for name in vars(hookspecs) if hasattr(getattr(hookspecs, name), "engine_spec")}
    for hook in HOOKS:
        spec = getattr(hookspecs, hook)
        parameters = ", ".join(spec.__code__.co_varnames[: spec.__code__.co_argcount])
        assert f"`{hook}({parameters})`" in DOCS["architecture.md"]
        for parameter in parameters.split(", "):
            assert f":param {parameter}:" in spec.__doc__
        assert "Example::" in spec.__doc__


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_every_hook_runs(hook):
    """The class in the documentation is built, registered and asked."""
    import engine.core as core
    from engine.core import Connector, Policy, SamplingParams, Scheduler, Transfer
    from engine.testing import make_core

    source = textwrap.dedent(getattr(hookspecs, hook).__doc__.split("Example::", 1)[1])
    names = {"__name__": "example", **{name: getattr(core, name) for name in core.__all__}}
    exec(source, names)
    (plugin,) = [
        value() for value in names.values()
        if isinstance(value, type) and value.__module__ == "example" and hook in vars(value)
    ]  # fmt: skip
    kwargs = {"scheduler": plugin} if isinstance(plugin, Scheduler) else {}
    engine = make_core(
        **kwargs,
        policies=[plugin] if isinstance(plugin, Policy) else [],
        connectors=[plugin] if isinstance(plugin, Connector) else [],
        num_pages=12,
    )
    requests = [engine.add([n] * 20, SamplingParams(max_tokens=3), metadata={"tenant": "t"}) for n in range(4)]
    if hook == "transfer_kv":
        engine.transfer(Transfer("t", "pull", requests[0].id))
    while engine.has_work:
        engine.step()
    assert all(request.finish == "length" for request in requests)
    assert engine.hooks.faults() == []


def test_the_reasons_are_all_documented():
    for why in Why:
        assert f"`{why.value}`" in DOCS["architecture.md"]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_benchmark_of_whole_engines_runs(tmp_path) -> None:
    """Without a model: requests that arrive at once, and over others."""
    command = [sys.executable, "benchmarks/serve.py", "--quick", "--rounds", "1", "--workloads", "W2,W4"]
    command += ["--side", "ours:label=one,executor=sim", "--page", str(tmp_path / "page.md")]
    command += ["--side", "ours:label=two,executor=sim,scheduler=radix,kvcache=radix"]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"^W2   one .* 16/16$", done.stdout, re.M), done.stdout
    assert re.search(r"^W4   two .* ms .* 12/12$", done.stdout, re.M), done.stdout
    assert re.search(r"^\| two \| [\d.]+ \| \d+ \|", (tmp_path / "page.md").read_text(), re.M)
