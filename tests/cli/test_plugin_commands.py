"""``engine plugins show``, ``new`` and ``check``, as people type them."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from engine.cli.plugin_new import write
from engine.cli.plugin_templates import CODE
from engine.core import SamplingParams
from engine.core.errors import ConfigError, PluginError
from engine.core.protocols import ROLES
from engine.core.record.desk import RecordOptions
from engine.core.registry import Registry, make
from engine.testing import SUITES, make_core
from engine.testing.checking import check, suites


def engine(*arguments: str, where: Path | None = None, path: Path | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-c", "from engine.cli import main; main()", *arguments],
        capture_output=True, text=True, timeout=300, cwd=where,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **({"PYTHONPATH": str(path)} if path else {})},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_show_tells_all_roles_of_a_name():
    code, out, _ = engine("plugins", "show", "radix")
    assert code == 0
    assert "scheduler radix = sglang" in out
    assert "kvcache radix = sglang" in out
    assert "hooks     plan, order, evict" in out
    assert "eviction_policy (one of lru, mru, fifo, filo, lfu, slru, priority; default 'lru'): which unused leaf" in out
    assert "provides  prefix-cache" in out
    assert "contract  >=1.0,<2" in out
    code, out, _ = engine("plugins", "show", "sglang", "--role", "kvcache")
    assert out.count("\n\n") == 0
    assert "sixhooks" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "radixx"], "no plugin is named 'radixx': did you mean 'radix'?"),
        (["show", "radix", "--role", "cache"], "unknown role 'cache': did you mean 'kvcache'?"),
        (["show", "unified", "--role", "policy"], "no policy is named 'unified': it is a scheduler\n"),
        (["show", "radix", "--role", "policy"], "no policy is named 'radix': it is a scheduler and a kvcache\n"),
        (["show", "radixx", "--role", "policy"], "no plugin is named 'radixx': did you mean 'radix'?"),
        (["show", "no.such:Thing"], "No module named 'no'; is its folder on PYTHONPATH?"),
        (["show", "engine.cli.no:Thing"], "No module named 'engine.cli.no'; is its folder on PYTHONPATH?"),
        (["show", "engine.cli:Thing"], "module 'engine.cli' has no attribute 'Thing'; repair it"),
        (["check", "radixx"], "no plugin and no distribution is named 'radixx': did you mean 'radix'?"),
        (["check", "no.such:Thing"], "cannot be imported from no.such:Thing"),
        (["check", "paged", "--option", "nonsense"], "--option 'nonsense' is no KEY=VALUE"),
        (
            ["check", "dlpm", "--option", "quantum=no"],
            "policy 'dlpm', option quantum (--option quantum=no): Input should be a valid number",
        ),
        (
            ["check", "dlpm", "--option", "quantm=1"],
            "has no option 'quantm' (--option quantm=1): did you mean 'quantum'?",
        ),
        (["new", "Bad_Name", "--role", "policy"], "must be small letters, digits and single dashes"),
        (["new", "fine", "--role", "police"], "no template for role 'police': did you mean 'policy'?"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, words, tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = arguments[0] == "check"  # it may be watched by a process of its own
    code, out, err = (engine if alone else here)("plugins", *arguments)
    assert code == 2, (out, err)
    assert words in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_list_is_the_command_alone_and_by_name():
    alone, listed = engine("plugins"), engine("plugins", "list")
    assert alone == listed
    assert "unified = vllm *" in alone[1]


def test_new_does_not_overwrite(tmp_path):
    write("fine", "policy", tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        write("fine", "policy", tmp_path)
    with pytest.raises(PluginError, match="no template for role 'front'.*did you mean 'frontend'"):
        write("other", "front", tmp_path)


def test_every_role_has_a_template_and_a_suite():
    assert set(CODE) == set(ROLES) == set(SUITES)


def test_a_new_plugin_does_not_slow_the_list_down(tmp_path):
    names = [f"my-{role}".replace("_", "-") for role in CODE]
    for name, role in zip(names, CODE, strict=True):
        write(name, role, tmp_path)
    code = "import sys; " + "".join(
        f"sys.path.append({str(tmp_path / name)!r}); import {name.replace('-', '_')}; " for name in names
    )
    heavy = "print([m for m in ('torch', 'transformers', 'fastapi', 'uvicorn') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code + heavy], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [
        ("fair-share", "policy", "taken by the policy 'fair-share' of sixhooks: choose another, e.g. my-fair-share"),
        ("sglang", "kvcache", "taken by the kvcache 'radix' of sixhooks, which has it as an alias"),
        ("openai", "frontend", "taken by the frontend 'openai' of sixhooks"),
        ("numpy", "policy", "taken by the installed distribution numpy: choose another, e.g. my-numpy"),
        ("zipfile", "policy", "taken by the module zipfile"),
    ],
)
def test_a_name_that_is_taken_is_refused(name, role, words, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(words)):
        write(name, role, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_package_of_a_one_word_name_is_not_hidden_by_its_folder(tmp_path):
    """Beside the folder Python finds the installed package, and not the folder as one without code."""
    assert (write("steady", "policy", tmp_path) / "tests" / "test_steady_plugin.py").is_file()
    project = tomllib.loads((tmp_path / "steady" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"engine.policies": {"steady": "steady_plugin:Steady"}}
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Editable:\n"  # as pip's editable installations are found: after everything on the path
        "    find_spec = staticmethod(lambda name, *_: PathFinder.find_spec(name, ['steady']))\n"
        "sys.meta_path.append(Editable)\n"
        "import steady_plugin; print(steady_plugin.Steady.name)\n"
    )
    (tmp_path / "watch.py").write_text(code)
    done = subprocess.run([sys.executable, "watch.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "steady\n", done.stderr


def test_a_name_of_another_role_is_free(tmp_path):
    assert write("fair-share", "executor", tmp_path).is_dir()


INSTALLED = ("policy", "frontend")  # fuzzed or not, and with processes of its own


@pytest.mark.parametrize("role", INSTALLED)
def test_a_new_package_installs_and_passes(role, tmp_path):
    """As a stranger would: new, pip install (offline), list, check, its own tests."""
    code, out, err = engine("plugins", "new", "my-own", "--role", role, where=tmp_path)
    assert code == 0, err
    assert "engine plugins check my-own" in out
    site, source = tmp_path / "site", tmp_path / "my-own"
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
        "--disable-pip-version-check", "--target", str(site), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code, out, err = engine("plugins", "show", "my-own", path=site)
    assert f"{role} my-own" in out
    assert "from      my-own 0.1.0 (my_own:MyOwn)" in out
    arguments = ["--workloads", "1", "--seed", "5", "--cost-limit", "0"]
    code, out, err = engine("plugins", "check", "my-own", *arguments, path=site)
    assert code == 0, out + err
    assert ("1 hold (seed 5)" in out) == (role == "policy")
    assert out.endswith("  ok\n")
    if role != "policy":
        return  # its tests are the rules that were checked just now
    tests = [sys.executable, "-m", "pytest", "-q", "-k", "selected or lone", str(source / "tests")]
    done = subprocess.run(tests, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


@pytest.mark.parametrize("role", sorted(set(CODE) - set(INSTALLED)))
def test_every_template_passes_its_suite(role, tmp_path, monkeypatch):
    name = f"my-{role}".replace("_", "-")
    folder = write(name, role, tmp_path)
    monkeypatch.syspath_prepend(folder)
    (suite,) = suites(f"my_{role}:{name.title().replace('-', '')}", Registry(), {})
    report = check(suite, seed=3, workloads=1, cost_limit=None)
    assert report.finding is None
    assert report.rules > 3
    assert any("batch invariance" in note for note in report.notes) == (role == "attention")
    if role == "connector":  # else the rule that what is saved comes back is silent
        assert suite.plugin.loads
        assert suite.plugin.saves


def test_a_new_cache_finds_what_the_last_step_of_a_request_computed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write("my-cache", "kvcache", tmp_path))
    cache = importlib.import_module("my_cache").MyCache()
    core = make_core(kvcache=cache, page_size=4)
    for tokens in (list(range(8)), [*range(8), 99]):  # the first ends with the step that computes all of it
        request = core.add(tokens, SamplingParams(max_tokens=1))
        while core.has_work:
            core.step()
    assert request.cached_tokens == 8


def test_check_says_which_rule_is_broken(tmp_path):
    (tmp_path / "twice.py").write_text(
        "from engine.core import Policy, hookimpl\n"
        "class Twice(Policy):\n"
        "    '''Everybody twice.'''\n"
        "    name = 'twice'\n"
        "    @hookimpl\n"
        "    def order(self, waiting):\n"
        "        return [*waiting, *waiting]\n"
    )
    code, out, _ = engine("plugins", "check", "twice:Twice", "--seed", "1", path=tmp_path)
    assert code == 1
    assert "BROKEN     Answers are valid and never counted as faults" in out
    assert "plugin 'twice' was at fault: order answered requests that are unknown or repeated" in out
    assert "again      engine plugins check twice:Twice --seed 1" in out


def test_check_says_how_to_try_the_same_options_again(tmp_path):
    (tmp_path / "unsure.py").write_text(
        "from pydantic import Field\n"
        "from engine.core import Policy, PluginOptions, hookimpl\n"
        "class Unsure(Policy):\n"
        "    '''Raises when told to.'''\n"
        "    name = 'unsure'\n"
        "    class Options(PluginOptions):\n"
        "        words: str = Field('', description='of the exception')\n"
        "    @hookimpl\n"
        "    def order(self, waiting):\n"
        "        assert not self.options.words, self.options.words\n"
    )
    arguments = ["--option", "words=not now", "--seed", "1"]
    code, out, _ = engine("plugins", "check", "unsure:Unsure", *arguments, path=tmp_path)
    assert code == 1
    assert "again      engine plugins check unsure:Unsure --option 'words=not now' --seed 1\n" in out


def test_check_takes_a_suite_with_its_settings(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from engine.testing import DoNothing, PolicySuite\n"
        "class TestMine(PolicySuite):\n"
        "    plugin = DoNothing\n"
        "    @classmethod\n"
        "    def situations(cls):\n"
        "        return super().situations()[:1]\n"
    )
    arguments = ["--workloads", "1", "--cost-limit", "100", "--running", "8"]
    code, out, _ = engine("plugins", "check", "mine:TestMine", *arguments, path=tmp_path)
    assert code == 0, out
    assert "µs a step at 8 running" in out


HANGS = """
import os, threading
from engine.core import Policy, hookimpl

class Waits(Policy):
    "Waits for who never comes."
    name = "waits"
    @hookimpl
    def order(self, waiting):
        if len(waiting) > 2:
            threading.Event().wait()

class Spins(Policy):
    "Looks for ever."
    name = "spins"
    @hookimpl
    def admit(self, request):
        while True:
            pass

class Dies(Policy):
    "Takes the process down."
    name = "dies"
    @hookimpl
    def admit(self, request):
        os.abort()

class Leaves(Policy):
    "Says that all is well, and goes."
    name = "leaves"
    @hookimpl
    def admit(self, request):
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("name", "rule", "words", "place"),
    [
        ("Waits", "Answers are valid", "it has not come back for 2 s", "line 11 in order"),
        ("Spins", "After close", "it has not come back for 2 s", "in admit"),
        ("Dies", "After close", "its process died of SIGABRT", "in admit"),
        ("Leaves", "After close", "its process was ended by somebody, with exit code 0", ""),
    ],
)
def test_a_plugin_that_never_comes_back_is_told_with_rule_and_place(name, rule, words, place, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    arguments = ["--time-limit", "2", "--seed", "1"]
    code, out, err = engine("plugins", "check", f"hangs:{name}", *arguments, path=tmp_path)
    assert code == 1, out + err
    assert out.startswith(f"policy {name.lower()} (local code)\n  BROKEN     {rule}")
    assert f"  what       {words}\n" in out
    assert re.search(r"^  where      test_\w+(\[.+\])? \(seed 1\)$", out, re.MULTILINE)
    if place:
        assert re.search(rf'^  stack  .*\n(.*\n)*? +File ".*hangs.py", .*{place}', out, re.MULTILINE), out
    assert f"again      engine plugins check hangs:{name} --seed 1 --time-limit 2" in out


def test_a_module_that_never_comes_back_is_told(tmp_path):
    (tmp_path / "endless.py").write_text("while True: pass\n")
    code, out, _ = engine("plugins", "check", "endless:Thing", "--time-limit", "2", path=tmp_path)
    assert code == 1
    assert "BROKEN     A plugin can be imported." in out
    assert 'endless.py", line 1 in <module>' in out


def test_without_a_time_limit_there_is_no_second_process(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import os\n"
        "from engine.core import Policy\n"
        "class Named(Policy):\n"
        "    'Named after its process.'\n"
        "    name = f'of-{os.getpid()}'\n"
    )
    arguments = ["plugins", "check", "parent:Named", "--workloads", "0", "--cost-limit", "0", "--time-limit"]
    code = "import os; print(os.getpid(), flush=True); from engine.cli import main; main()"
    for limit, same in (("0", True), ("60", False)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, limit], capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        pid = done.stdout.splitlines()[0]
        assert (f"policy of-{pid} " in done.stdout) == same


def test_who_ends_the_check_ends_what_hangs(tmp_path):
    (tmp_path / "endless.py").write_text(
        f"import os, pathlib\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\nwhile True: pass\n"
    )
    command = [sys.executable, "-c", "from engine.cli import main; main()", "plugins", "check", "endless:Thing"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_options_of_plugins_are_not_dropped_in_silence():
    code, _, err = engine("plugins", "check", "radix", "--scheduler.policy", "lpm")
    assert code == 2
    assert "'check' takes no plugin options such as --scheduler.policy" in err


def test_a_recording_is_replayed_with_its_policies_or_with_others(tmp_path, here):
    core = make_core(
        record=RecordOptions(on=True), policies=[make("policy", "fair-share", {"weights": {"a": 9.0}})], max_running=1
    )
    for number in range(8):
        core.add([number] * 9, SamplingParams(max_tokens=3), metadata={"tenant": "ab"[number > 3]})
    while core.has_work:
        core.step()
    file = tmp_path / "evening.jsonl"
    core.record.write(file)
    assert here("replay", str(file)) == (0, "1 of 1 traces equal, 24 steps\n", "")
    same = ("--policy", "fair-share", "--policy.fair-share.weights", "a=9")
    code, out, _ = here("replay", str(file), *same)
    assert code == 0
    assert "all 24 steps are the same" in out
    code, out, _ = here("replay", str(file), "--policy", "fair-share")
    assert code == 0
    assert "the decisions part at step" in out
    assert "ttft_mean" in out
    code, out, _ = here("replay", str(file), "--policy.fair-share.weights", "b=9", "--json")
    [told] = json.loads(out)
    assert told["parted"]["step"] > 1
    assert told["same"]["ended"] == told["changed"]["ended"] == {"length": 8}
    code, _, err = here("replay", str(file), *same[:2], "--policy.fair-share.wait", "1")
    assert code == 2
    assert "'wait' (flag --policy.fair-share.wait): did you mean 'weights'?" in err
    foreign = sorted((Path(__file__).parents[1] / "conformance" / "data").rglob("*.json"))[0]
    code, _, err = here("replay", str(foreign), "--policy", "fair-share")
    assert code == 2
    assert "plugins and options are chosen for decision logs of our own engine" in err
