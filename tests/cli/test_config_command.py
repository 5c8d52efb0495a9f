"""``engine config`` and the options of plugins in the help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.core.config import EngineConfig, flag_of, load_config, variable_of
from engine.core.effective import Effective
from engine.core.values import readable


def told(here, *arguments, **more):
    code, out, err = here(*arguments, **more)
    assert code == 0, err
    return out


def test_every_value_with_its_origin(here, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('page_size = 8\n[scheduler]\nname = "radix"\npolicy = "lpm"\n')
    env = {"ENGINE_MAX_RUNNING": "7", "ENGINE_POLICIES__DLPM__QUANTUM": "5"}
    flags = ("--policy", "dlpm", "--scheduler.seed", "3", "--api-key", "sesame")
    out = told(here, "config", "--config", str(file), *flags, env=env)
    rows = {
        key: (value, origin) for key, value, origin in (re.split(r"  +", line, maxsplit=2) for line in out.splitlines())
    }
    assert rows["page_size"] == ("8", f"file {file}")
    assert rows["scheduler"] == ("radix", f"file {file}")
    assert rows["scheduler.policy"] == ("lpm", f"file {file}")
    assert rows["scheduler.seed"] == ("3", "flag --scheduler.seed")
    assert rows["scheduler.max_overtakings"] == ("64", "default")
    assert rows["max_running"] == ("7", "environment ENGINE_MAX_RUNNING")
    assert rows["policies.dlpm.quantum"] == ("5.0", "environment ENGINE_POLICIES__DLPM__QUANTUM")
    assert rows["policies.dlpm.window"] == ("128", "default")
    assert rows["kvcache.enable_prefix_caching"] == ("true", "default")
    assert rows["api_key"] == ("***", "flag --api-key")
    assert "sesame" not in out


def test_the_file_that_it_prints_configures_the_same(here, tmp_path):
    flags = ("--scheduler", "radix", "--policy", "fair-share", "--policy.fair-share.weights", "a=2", "--port", "1")
    file = tmp_path / "engine.toml"
    file.write_text(told(here, "config", "--toml", *flags, "--scheduler.waiting-timeout", "none"))
    before = json.loads(told(here, "config", "--json", *flags))
    again = json.loads(told(here, "config", "--json", "--config", str(file)))
    assert again["values"] == before["values"]
    assert again["plugins"] == before["plugins"]
    assert before["values"]["policies.fair-share.weights"] == {"a": 2.0}
    assert before["origins"]["port"] == "flag --port"
    assert again["origins"]["port"] == f"file {file}"
    assert {plugin["role"] for plugin in again["plugins"]} == {
        "scheduler", "kvcache", "policy", "grammar", "frontend", "tool_parser", "executor", "attention"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--scheduler", "radixx"], "unknown scheduler 'radixx': did you mean 'radix'?"),
        (["--executor.step-mss", "1"], "executor 'sim' has no option 'step_mss' (flag --executor.step-mss): did you"),
        (["--port", "many"], "port (flag --port)"),
        (["--policy.dlpm.quantum", "5"], "policy 'dlpm' is not selected: select it with --policy dlpm"),
        (["--policy", "dlpm", "--policy.dlpm.quantum", "0"], "policy 'dlpm', option quantum (flag --policy.dlpm.quant"),
        (["--kv-memory", "much"], "kv_memory (flag --kv-memory): 'much' is not a size"),
    ],
)
def test_mistakes_are_told_as_by_serve(here, flags, words):
    shown, served = (here(command, "--executor", "sim", *flags) for command in ("config", "serve"))
    assert shown == served
    assert shown[0] == 2
    assert words in shown[2]
    assert "Traceback" not in shown[2]


def test_one_format_at_a_time(here):
    assert "one of them" in here("config", "--json", "--toml")[2]


def test_help_lists_the_options_of_the_selected_plugins(here, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('kvcache = "radix"\n')
    env = {"ENGINE_EXECUTOR": "sim", "COLUMNS": "320"}
    flags = ("--scheduler", "radix", "--policy", "dlpm", "--policy=k-lpm", "--config", str(file))
    out = told(here, "serve", *flags, "--help", env=env)
    head, _, rest = out.partition("Options of the scheduler radix")
    assert "--max-running" in head
    assert "[default: 2048]" in head
    assert re.search(r"--scheduler\.policy +one of fcfs, lpm, .* \[default: fcfs\]", rest)
    assert re.search(r"--scheduler\.max-prefill-streak +int, at least 1 +prefill batches in a row", rest)
    assert re.search(
        r"--policy\.dlpm\.quantum +float, above 0 +tokens that each waiting tenant .*\[default: 1024\.0\]", rest
    )
    assert re.search(r"Options of the policy k-lpm.*\n.*--policy\.k-lpm\.k +int, at least 1", rest)
    assert re.search(r"--kvcache\.eviction-policy +one of lru, mru", rest)
    assert re.search(r"--executor\.step-ms +float, at least 0", rest)
    assert re.search(r"--frontend\.max-body-bytes +int, at least 1024", rest)
    assert "attention" not in rest.lower()  # the executor sim wants none


@pytest.mark.parametrize("command", ["generate", "doctor", "config", "serve", ("plugins", "list")])
def test_help_of_every_command_that_takes_the_flags(here, command):
    words = (command,) if isinstance(command, str) else command
    out = told(here, *words, "--help", "--executor", "sim")
    assert "--executor.step-ms" in out
    assert ("--frontend.max-body-bytes" in out) == (command != "generate")
    assert "--executor.step-ms" not in told(here, "replay", "--help")


@pytest.mark.parametrize(
    ("flags", "words", "still"),
    [
        (("--scheduler", "radixx"), "error: unknown scheduler 'radixx': did you mean 'radix'?", "--executor.dtype"),
        (("--executor.dtyp", "x"), "executor 'torch' has no option 'dtyp' (flag --executor.dtyp)", "--executor.dtype"),
        (("--config", "/no/such.toml"), "No such file", "--max-running"),
        (("--policy", "no.such:Thing"), "cannot be imported from no.such:Thing", "--scheduler.watermark"),
    ],
)
def test_help_is_printed_whatever_is_wrong(here, flags, words, still):
    out = told(here, "serve", *flags, "--help")
    assert words in re.sub(r"[│\s]+", " ", out)
    assert still in out


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom engine.cli.app import run\n"
        "try: run(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_options_of_policies_reach_the_engine(here):
    flags = ("--executor", "sim", "--raw", "--max-tokens", "2", "--policy", "early-reject")
    code, _, err = here("generate", "hi", *flags, "--policy.early-reject.within", "none")
    assert code == 2
    assert "option within (flag --policy.early-reject.within)" in err
    env = {"ENGINE_POLICIES__EARLY_REJECT__WITHIN": "5"}
    assert here("generate", "hi", *flags, env=env)[0] == 0


DOCS = Path(__file__).parents[2] / "docs"


def test_the_docs_have_every_key_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    told = {key: (default.strip("`"), words.replace("`", "")) for key, default, words in rows}
    values = dict(Effective(load_config()).values())
    assert told == {
        key: (readable(values[key]).replace("[]", "none"), field.description)
        for key, field in EngineConfig.model_fields.items()
    }


@pytest.mark.parametrize("page", ["configuration.md", "plugins.md"])
def test_the_flags_and_variables_of_the_docs_are_those(page):
    text = (DOCS / page).read_text()
    pairs = {
        "kvcache.enable_prefix_caching": "false", "policies.cap.limit": "1", "scheduler.policy": "lpm",
        "policies.dlpm.quantum": "512",
    }  # fmt: skip
    told = [key for key, value in pairs.items() if f"`{flag_of(key)} {value}`" in text]
    assert told == [key for key, value in pairs.items() if f"`{variable_of(key)}={value}`" in text]
    assert len(told) == 2


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("serve", "--executor", "sim", "--executor.step-mss", "1"), {}),
        (("serve",), {"ENGINE_SHEDULER": "radix"}),
        (("serve", "--policy.dlpm.quantum", "5"), {}),
    ],
)
def test_the_mistakes_of_the_docs_are_told_so(here, arguments, env):
    code, _, err = here(*arguments, env=env)
    assert code == 2
    assert err in (DOCS / "configuration.md").read_text()
