"""The ``engine`` command, as people type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.cli.flags import split_dotted


def engine(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    done = subprocess.run(
        [sys.executable, "-c", "from engine.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        input=stdin,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


def refused(engine: Any, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What standard error says of a command that must be refused: one line, no traceback."""
    code, out, err = engine(*arguments, env=env)
    assert code == 2, (out, err)
    assert "Traceback" not in err
    return err


def test_version_and_help() -> None:
    code, out, _ = engine("--version")
    assert code == 0
    assert re.fullmatch(r"sixhooks \d+\.\d+\.\d+\n", out)
    code, out, _ = engine("serve", "--help")
    assert code == 0
    for flag in ("--scheduler", "--kv-memory", "--policy", "--config", "--in-process", "--max-model-len"):
        assert flag in out


def test_starting_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine.cli.app as app; app.build()\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'http.client', 'zmq')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "plain", "dotted"),
    [
        (["serve", "--port", "0"], ["serve", "--port", "0"], {}),
        (["--scheduler.chunked-prefill-size", "512", "x"], ["x"], {"scheduler.chunked_prefill_size": "512"}),
        (["--kvcache.name-of=a=b", "x"], ["x"], {"kvcache.name_of": "a=b"}),
        (["--executor.fast", "--port", "1"], ["--port", "1"], {"executor.fast": "true"}),
        (["--executor.fast"], [], {"executor.fast": "true"}),
        (["generate", "--", "--a.b", "c"], ["generate", "--", "--a.b", "c"], {}),
    ],
)
def test_plugin_options_among_the_arguments(arguments: list[str], plain: list[str], dotted: dict[str, str]) -> None:
    assert split_dotted(arguments) == (plain, dotted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--scheduler", "radixx"], "unknown scheduler 'radixx': did you mean 'radix'?"),
        (["serve", "--executor", "sim", "--executor.step-mss", "1"], "did you mean 'step_ms'?"),
        (["serve", "--executor", "sim", "--executor.step-ms", "soon"], "step_ms"),
        (["serve", "--schedulr.x", "1"], "did you mean 'scheduler'?"),
        (["serve", "--port", "many"], "port (flag --port)"),
        (["serve", "--port", "70000"], "port (flag --port)"),
        (["serve", "--max-runing", "3"], "--max-running"),
        (["serve", "--config", "/no/such/file.toml"], "No such file"),
        (["serve", "--model", "./nowhere.gguf"], "nowhere.gguf"),
        (["serve", "--executor", "sim", "--policy", "nobody"], "unknown policy 'nobody'"),
        (["serve", "--frontend", "opnai"], "did you mean 'openai'?"),
        (["serve", "--frontend.max-body-byte", "1"], "did you mean 'max_body_bytes'?"),
        (["serve", "--executor", "no.such:Thing"], "no.such"),
        (["serve", "--executor", "sim", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
        (["generate", "hi", "--executor", "sim", "--raw", "--max-tokens", "0"], "max_tokens"),
        (["plugins", "--scheduler.x", "1"], "scheduler 'unified' has no option 'x'"),
        (["replay", "trace.json", "--executor.x", "1"], "takes no plugin options"),
        (["plugins", "--schedulr.x", "1"], "did you mean 'scheduler'?"),
        (["serve", "--executor", "sim", "--api-key", ""], "api_key (flag --api-key): is empty"),
        (["serve", "--executor", "sim", "--step-timeout", "0"], "step_timeout (flag --step-timeout)"),
        (["serve", "--executor", "sim", "--role", "prefil"], "role (flag --role): "),
        (["serve", "--executor", "sim", "--role", "decode"], "role (flag --role): 'decode' needs a connector"),
        (["proxy"], "--decode"),
        (["proxy", "--decode", "h:1"], "--decode: 'h:1' is not a URL such as http://127.0.0.1:8001"),
        (["proxy", "--decode", "http://h:1", "--style", "trt"], "--style 'trt': one of vllm, sglang"),
        (["proxy", "--decode", "http://h:1", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000"),
        (["proxy", "--decode", "http://h:1", "--scheduler.x", "1"], "'proxy' takes no plugin options"),
        (["sevre"], "serve"),
    ],
)
def test_mistakes_are_one_clear_line(here: Any, arguments: list[str], words: str) -> None:
    assert words in refused(here, *arguments)


def test_a_mistake_as_people_see_it() -> None:
    assert "did you mean 'radix'?" in refused(engine, "serve", "--scheduler", "radixx")


def test_what_is_loaded_is_what_is_said(here: Any) -> None:
    nowhere = ("serve", "--host", "256.0.0.1")
    _, out, _ = here(*nowhere, "--executor", "sim")
    assert "starting executor sim, without a model …" in out
    assert "SmolLM2" not in out
    _, out, _ = here("serve", "--model", "./nowhere.gguf")
    assert "loading ./nowhere.gguf …" in out


def test_address_in_use(here: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "in use" in refused(here, "serve", "--executor", "sim", "--port", str(port))


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('max_running = 3\nmax_waiting = 30\npage_size = 8\n[executor]\nname = "sim"\nstep_ms = 1\n')
    env = {"ENGINE_MAX_WAITING": "40", "ENGINE_PAGE_SIZE": "32", "ENGINE_EXECUTOR__VOCAB_SIZE": "50000"}
    out = start_and_stop("--config", str(file), "--page-size", "4", "--executor.pages", "100", env=env)
    assert "KV pages   100 x 4 tokens = 400 tokens" in out
    assert "3 running, 40 waiting" in out
    assert "step_ms=1.0" in out
    assert "vocab_size=50000" in out
    assert "flag --page-size: page_size" in out
    assert "environment ENGINE_MAX_WAITING: max_waiting" in out
    assert f"file {file}: max_running" in out


def test_bad_environment_and_file_name_their_origin(here: Any, tmp_path: Path) -> None:
    assert "environment ENGINE_SHEDULER" in refused(here, "serve", env={"ENGINE_SHEDULER": "radix"})
    assert "api_key (environment ENGINE_API_KEY): is empty" in refused(here, "serve", env={"ENGINE_API_KEY": ""})
    file = tmp_path / "engine.toml"
    file.write_text("max_running = 0\n")
    assert f"max_running (file {file})" in refused(here, "serve", "--config", str(file))
    file.write_text("max_running = \n")
    assert "not valid TOML" in refused(here, "serve", "--config", str(file))


def test_start_says_what_was_chosen() -> None:
    out = start_and_stop("--executor", "sim", "--scheduler", "sglang", "--kvcache", "radix", "--api-key", "sesame")
    for words in (
        "scheduler  radix (sixhooks",
        "kvcache    radix (sixhooks",
        "executor   sim (sixhooks",
        "/openapi.json",
    ):
        assert words in out
    assert "sesame" not in out


def start_and_stop(*flags: str, env: dict[str, str] | None = None) -> str:
    """Start a server, wait until it listens, stop it; its output."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None
    lines = []
    with process.stdout:
        for line in process.stdout:
            lines.append(line)
            if "listening on" in line:
                process.terminate()
    assert process.wait(60) == 0, "".join(lines)
    return "".join(lines)


def test_generate_streams_text_to_standard_output() -> None:
    code, out, err = engine("generate", "hello there", "--executor", "sim", "--raw", "--max-tokens", "6")
    assert code == 0
    assert out.strip()
    assert "6 generated, finish: length" in err
    assert engine("generate", "-", "--executor", "sim", "--raw", "--max-tokens", "6", stdin="hello there")[1] == out


def test_generate_seed_is_the_requests_seed(here: Any) -> None:
    ask = ("generate", "hi", "--executor", "sim", "--max-tokens", "6", "--temperature", "1")
    one, two, three = (here(*ask, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert one == two != three


def test_embed_writes_a_line_of_json_for_each_text(here: Any) -> None:
    code, out, err = here("embed", "hello", "a b", "--executor", "sim", "--pooling", "mean")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1]
    assert all(len(line["embedding"]) == 32 and line["prompt_tokens"] > 0 for line in lines)
    assert engine("embed", "-", "--executor", "sim", "--pooling", "mean", stdin="hello\na b\n")[1] == out
    raw = json.loads(here("embed", "hello", "--executor", "sim", "--pooling", "mean", "--raw")[1])["embedding"]
    length = sum(number**2 for number in raw) ** 0.5
    assert [number / length for number in raw] == pytest.approx(lines[0]["embedding"], abs=1e-6)
    code, out, err = here("embed", "hello", "", "--executor", "sim")
    assert (code, out) == (2, "")
    assert "prompts[1]" in err
    assert "is empty" in err


def test_plugins_as_json(here: Any) -> None:
    lines = json.loads(here("plugins", "--json")[1])
    assert {line["role"] for line in lines} >= {"scheduler", "kvcache", "executor", "attention", "frontend"}
    assert {line["status"] for line in lines if line["distribution"] == "sixhooks"} == {"ok"}
    assert active(lines) == {
        ("scheduler", "unified"),
        ("kvcache", "paged"),
        ("executor", "torch"),
        ("attention", "auto"),
        ("grammar", "llguidance"),
        ("tool_parser", "hermes"),
        ("frontend", "openai"),
    }


def active(lines: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(line["role"], line["name"]) for line in lines if line["active"]}


def test_plugins_marks_what_this_configuration_selects(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('max_running = 3\nkvcache = "radix"\n')
    env = {"ENGINE_SCHEDULER": "sglang", "ENGINE_VERSION": "3"}  # an alias, and a variable of somebody else
    code, out, err = engine("plugins", "--json", "--config", str(file), "--executor", "sim", env=env)
    assert code == 0, err
    assert active(json.loads(out)) == {
        ("scheduler", "radix"),
        ("kvcache", "radix"),
        ("executor", "sim"),  # which wants no attention backend
        ("grammar", "llguidance"),
        ("tool_parser", "hermes"),
        ("frontend", "openai"),
    }
    assert "active with this configuration" in engine("plugins")[1]


def test_plugins_shows_what_is_selected_and_not_there(here: Any) -> None:
    code, out, err = here("plugins", "--json", "--policy", "nobody", "--kvcache", "engine.nowhere:Cache")
    assert code == 2
    broken = {line["name"]: line for line in json.loads(out) if line["status"] == "broken" and line["active"]}
    assert "unknown policy 'nobody'" in broken["nobody"]["cause"]
    assert "cannot be imported" in broken["engine.nowhere:Cache"]["cause"]
    assert "unknown policy 'nobody'" in err
    code, out, _ = here("plugins", "--scheduler", "engine.plugins.schedulers.radix:RadixScheduler")
    assert code == 0
    assert re.search(r"RadixScheduler \* +local code", out)


def test_plugins_shows_what_is_broken_and_the_rest_works(tmp_path: Path) -> None:
    """A distribution whose module does not import: a line here, and no obstacle for others."""
    info = tmp_path / "broken_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[engine.schedulers]\nbroken = broken_plugin:Scheduler\n")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('half installed')\n")
    env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    code, out, _ = engine("plugins", env=env)
    assert code == 0
    for words in ("unified = vllm *", "radix = sglang", "sixhooks 0.1.0", "openai *"):
        assert words in out
    [line] = [line for line in out.splitlines() if "broken-plugin 1.2" in line]
    assert "broken" in line
    assert "half installed" in out
    assert "half installed" in refused(engine, "serve", "--scheduler", "broken", "--executor", "sim", env=env)
    assert engine("generate", "hi", "--executor", "sim", "--raw", "--max-tokens", "2", env=env)[0] == 0


def test_doctor_counts_pages_of_the_model(here: Any) -> None:
    code, out, err = here("doctor", "--kv-memory", "100MiB")
    assert code == 0, err
    assert re.search(r"^ok +torch +\d", out, re.MULTILINE)
    assert re.search(r"KV pages +\d+ pages x 16 tokens", out)
    assert re.search(r"^ok +attention +auto .*; (cpu \(.*compiled by|torch; not )", out, re.MULTILINE)
    assert re.search(r"^ok +attention torch +can, float32 on ", out, re.MULTILINE)
    assert re.search(r"^(ok|absent) +attention flashinfer +can", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"n_head": 12, "n_embd": 768, "n_layer": 12, "n_positions": 1024}, "(73728 bytes a token)"),
        ({"num_attention_heads": 12}, "no usable hidden_size"),
        ({"num_attention_heads": None, "n_head": "many"}, "no usable num_attention_heads"),
        ({}, "no usable num_attention_heads"),
    ],
)
def test_doctor_reads_other_models_shapes(here: Any, tmp_path: Path, shape: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    code, out, err = here("doctor", "--model", str(tmp_path))
    assert code == (0 if "bytes" in words else 1)
    assert words in out
    assert "Traceback" not in err


def test_doctor_says_a_bad_option_once(here: Any) -> None:
    code, out, err = here("doctor", "--executor.dtype", "float8")
    assert code == 1
    assert [line.split()[1] for line in out.splitlines() if line.startswith("MISSING")] == ["executor"]
    assert "dtype" in out
    assert "not ready: executor\n" in err


def test_doctor_names_all_that_is_missing(here: Any) -> None:
    code, out, err = here("doctor", "--model", "./nowhere.gguf", "--scheduler", "radixx")
    assert code == 1
    assert "did you mean 'radix'" in out
    assert "not ready: scheduler, model" in err


def test_the_command_itself_is_installed() -> None:
    script = Path(sys.executable).with_name("engine")
    began = time.monotonic()
    assert subprocess.check_output([script, "--version"], text=True).startswith("sixhooks ")
    assert time.monotonic() - began < 10


@pytest.mark.model
def test_generate_with_the_default_model() -> None:
    code, out, err = engine("generate", "What is the capital of France? Answer in one word.", "--max-tokens", "12")
    assert code == 0, err
    assert "Paris" in out


@pytest.mark.model
def test_render_shows_the_exact_prompt(here: Any) -> None:
    code, out, err = here("render", "hi")
    text, _, ids = out.rstrip("\n").rpartition("\n")
    assert code == 0
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert err == f"[{len(ids.split())} tokens of SmolLM2-135M-Instruct]\n"
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]}
    code, out, _ = here("render", json.dumps(body), "--closed", "--json")
    answer = json.loads(out)
    assert answer["prompt"].endswith("<|im_start|>assistant\n<|im_end|>\n")
    assert answer["count"] == len(answer["prompt_token_ids"])
    for bad, words in (("[", "not valid JSON"), ('{"a": 1}', "list of messages"), ("[1]", "message 0")):
        assert words in refused(here, "render", bad)
