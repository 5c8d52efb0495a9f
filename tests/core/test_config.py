"""Configuration: precedence, origins, and refusals that name the key."""

from __future__ import annotations

import pytest

from engine.core import ConfigError, EngineConfig, load_config
from engine.core.assemble import assemble, size_limits
from engine.core.config import flag_of, parse_bytes, variable_of
from engine.core.protocols import ModelInfo
from engine.plugins.executors.sim import SimExecutor


def test_defaults():
    loaded = load_config()
    assert loaded.config == EngineConfig()
    assert loaded.config.scheduler.name == "unified"
    assert loaded.config.kvcache.name == "paged"
    assert not loaded.origins


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text(
        'max_running = 3\nport = 1\npage_size = 8\npolicies = ["a", "b"]\n'
        '[scheduler]\nname = "radix"\npolicy = "lpm"\nchunked_prefill_size = 32\n'
    )
    env = {"ENGINE_PORT": "2", "ENGINE_PAGE_SIZE": "4", "ENGINE_SCHEDULER__POLICY": "lof", "PATH": "ignored"}
    loaded = load_config(file=file, env=env, flags={"page_size": 2, "host": None})
    config = loaded.config
    assert (config.max_running, config.port, config.page_size, config.host) == (3, 2, 2, "127.0.0.1")
    assert config.scheduler.name == "radix"
    assert config.scheduler.options == {"policy": "lof", "chunked_prefill_size": 32}
    assert [policy.name for policy in config.policies] == ["a", "b"]
    assert loaded.origins["page_size"] == "flag --page-size"
    assert loaded.origins["port"] == "environment ENGINE_PORT"
    assert loaded.origins["scheduler.chunked_prefill_size"] == f"file {file}"


def test_another_plugin_drops_the_options_of_the_first(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('[scheduler]\nname = "radix"\nchunked_prefill_size = 32\n')
    config = load_config(file=file, flags={"scheduler": "unified"}).config
    assert config.scheduler.options == {}


def test_options_without_a_name_are_those_of_the_default():
    config = load_config(flags={"scheduler.watermark": "0.1"}).config
    assert config.scheduler.name == "unified"
    assert config.scheduler.options == {"watermark": "0.1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shceduler = 'radix'", "unknown key 'shceduler'.*did you mean 'scheduler'"),
        ("max_running = 'many'", "max_running.*integer.*'many'"),
        ("max_running = 0", "max_running.*greater than or equal to 1"),
        ("scheduler = 3", "scheduler.*plugin's name"),
        ("[max_running]\nx = 1", "max_running has no options"),
        ("= 1", "not valid TOML"),
    ],
)
def test_bad_files_name_the_key(tmp_path, text, message):
    file = tmp_path / "engine.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file=file)


def test_a_missing_file():
    with pytest.raises(ConfigError, match="nowhere.toml: No such file"):
        load_config(file="nowhere.toml")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("64k", 64 * 2**10),
        ("1000", 1000),
        ("7b", 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "3QiB", "GiB", "1 2GiB"])
def test_bad_sizes(text):
    with pytest.raises(ConfigError, match="is not a size such as"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scheduler": "radxi"}, "unknown scheduler 'radxi': did you mean 'radix'"),
        (
            {"kvcache": {"name": "paged", "enable_prefix_cahcing": True}},
            "no option 'enable_prefix_cahcing'.*did you mean",
        ),
        ({"scheduler": {"name": "radix", "policy": "luck"}}, "scheduler 'radix', option policy"),
        ({"scheduler": {"name": "unified", "watermark": 2}}, "option watermark.*less than 1"),
        ({"num_pages": 1, "page_size": 1}, "the pool is too small for one request"),
        ({"max_model_len": 10**6}, "max_model_len 1000000 is above the model's own 8192"),
        ({"scheduler": "radix", "max_running": 64, "max_batch_tokens": 32}, "max_batch_tokens .32. must be at least"),
        (
            {"scheduler": {"name": "unified", "enable_chunked_prefill": False}},
            "without chunked prefill max_batch_tokens",
        ),
        ({"scheduler": {"name": "radix", "chunked_prefill_size": -1}}, "without chunked prefill max_batch_tokens"),
        ({"scheduler": "radix", "max_batch_tokens": 8, "max_running": 4}, "chunks are whole pages"),
        ({"scheduler": {"name": "radix", "chunked_prefill_size": 8}}, "chunks are whole pages"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(config, message):
    from engine.core import PluginError

    with pytest.raises((ConfigError, PluginError), match=message):
        assemble(EngineConfig.model_validate({"executor": "sim", **config}))


def test_the_pool_is_sized_from_memory():
    class Sized(SimExecutor):
        def default_pages(self, page_size):
            return None

    model = ModelInfo(name="m", vocab_size=10, max_model_len=100, kv_bytes_per_token=1024)
    limits = size_limits(EngineConfig(kv_memory="1MiB", page_size=16), model, Sized())
    assert limits.num_pages == 64
    with pytest.raises(ConfigError, match="does not hold one page of 16384 bytes"):
        size_limits(EngineConfig(kv_memory="1KiB", page_size=16), model, Sized())


def test_an_executor_may_say_how_many_tokens_a_step_should_have():
    class Slow(SimExecutor):
        def default_batch_tokens(self):
            return 300

    model = ModelInfo(name="m", vocab_size=10, max_model_len=100)
    assert size_limits(EngineConfig(), model, Slow()).max_batch_tokens == 300
    assert size_limits(EngineConfig(), model, SimExecutor()).max_batch_tokens == 2048
    assert size_limits(EngineConfig(max_batch_tokens=7), model, Slow()).max_batch_tokens == 7


def test_variables_of_others_are_left_alone():
    env = {"ENGINE_VERSION": "3", "ENGINE_": "", "ENGINE_HOME__X": "/", "ENGINE_PORT_8000_TCP_ADDR": "10.0.0.1"}
    loaded = load_config(env={**env, "ENGINE_PORT": "1"})
    assert loaded.config.port == 1
    assert list(loaded.origins) == ["port"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ENGINE_SHEDULER", "'sheduler' .environment ENGINE_SHEDULER.: did you mean 'scheduler'"),
        ("ENGINE_KV_CACHE", "did you mean 'kvcache'"),
        ("ENGINE_EXECUTER__STEP_MS", "did you mean 'executor'"),
        ("ENGINE_MAX_RUNNING__X", "max_running has no options"),
    ],
)
def test_misspelt_variables_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        load_config(env={name: "1"})


def test_patience_with_the_engine_is_configured():
    config = load_config(env={"ENGINE_STEP_TIMEOUT": "7.5"}, flags={"heartbeat_timeout": "2"}).config
    assert (config.step_timeout, config.heartbeat_timeout) == (7.5, 2)
    with pytest.raises(ConfigError, match="step_timeout .flag --step-timeout.: .*greater than 0"):
        load_config(flags={"step_timeout": "0"})


@pytest.mark.parametrize("key", ["", "  ", "two words", "clé", "secret\n"])
def test_a_key_that_protects_nothing_or_cannot_be_sent_is_refused(key):
    with pytest.raises(
        ConfigError, match="api_key .environment ENGINE_API_KEY.: (is empty|must be printable)"
    ) as caught:
        load_config(env={"ENGINE_API_KEY": key})
    assert "secret" not in str(caught.value)


def test_the_key_is_hidden_in_descriptions():
    assert EngineConfig(api_key="secret").describe()["api_key"] == "***"


FAIR = {"ENGINE_POLICIES": "a,fair-share", "ENGINE_POLICIES__FAIR_SHARE__QUANTUM": "5"}


def options(loaded):
    """Name -> options of each selected policy."""
    return {policy.name: policy.options for policy in loaded.config.policies}


@pytest.mark.parametrize(
    "text",
    [
        'policies = ["a", {name = "fair-share", quantum = 5}]',
        'policies = [{name = "a"}, {name = "fair-share", quantum = 5}]',
        "[policies.a]\n[policies.fair-share]\nquantum = 5",
        '[[policies]]\nname = "a"\n[[policies]]\nname = "fair-share"\nquantum = 5',
    ],
)
def test_policies_and_their_options_in_a_file(tmp_path, text):
    file = tmp_path / "engine.toml"
    file.write_text(text)
    loaded = load_config(file=file)
    assert list(options(loaded).items()) == [("a", {}), ("fair-share", {"quantum": 5})]
    assert loaded.origins == {"policies": f"file {file}", "policies.fair-share.quantum": f"file {file}"}


@pytest.mark.parametrize("env", [FAIR, dict(reversed(FAIR.items()))], ids=["selected first", "option first"])
def test_policies_and_their_options_in_the_environment(env):
    loaded = load_config(env=env)
    assert options(loaded) == {"a": {}, "fair-share": {"quantum": "5"}}
    assert loaded.origins["policies.fair-share.quantum"] == "environment ENGINE_POLICIES__FAIR_SHARE__QUANTUM"


@pytest.mark.parametrize("role", ["policy", "policies"])
def test_policies_and_their_options_as_flags(role):
    flags = {"policies": ["a", "fair-share"], f"{role}.fair-share.quantum": "6"}
    loaded = load_config(env={"ENGINE_POLICIES__FAIR_SHARE__QUANTUM": "5"}, flags=flags)
    assert options(loaded) == {"a": {}, "fair-share": {"quantum": "6"}}
    assert loaded.origins["policies.fair-share.quantum"] == "flag --policy.fair-share.quantum"


def test_a_selection_keeps_the_options_of_those_who_stay(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text("[policies.a]\nx = 1\n[policies.b]\ny = 2\n")
    loaded = load_config(file=file, flags={"policies": ["b", "c"]})
    assert list(options(loaded).items()) == [("b", {"y": 2}), ("c", {})]
    assert loaded.origins == {"policies": "flag --policy", "policies.b.y": f"file {file}"}
    assert options(load_config(file=file, flags={"policies": [""]})) == {}


def test_policies_in_python():
    config = EngineConfig.model_validate({"policies": {"a": {"x": 1}, "b": {}}})
    assert [(policy.name, policy.options) for policy in config.policies] == [("a", {"x": 1}), ("b", {})]


def test_local_code_has_options_too():
    name = "my_pkg.rules:Mine"
    assert options(load_config(flags={"policies": [name], f"policies.{name}.limit": "3"})) == {name: {"limit": "3"}}
    env = {"ENGINE_POLICIES": name, "ENGINE_POLICIES__MY_PKG_RULES_MINE__LIMIT": "4"}
    assert options(load_config(env=env)) == {name: {"limit": "4"}}


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        ({"ENGINE_POLICIES__DLPM__QUANTUM": "5"}, {}, "ENGINE_POLICIES__DLPM__QUANTUM.*not selected: select it with"),
        ({}, {"policies": ["dlpm"], "policy.dlmp.quantum": "5"}, "flag --policy.dlmp.quantum.*did you mean 'dlpm'"),
        ({"ENGINE_POLICIES": "dlpm", "ENGINE_POLICIES__QUANTUM": "5"}, {}, "names no option"),
        ({"ENGINE_POLICY": "dlpm"}, {}, "unknown key 'policy' .environment ENGINE_POLICY.: did you mean 'policies'"),
        ({}, {"policies": [{"quantum": 1}]}, "a table needs a 'name'"),
        ({}, {"policies": 5}, "flag --policy.: must be a list of names or tables"),
        ({}, {"policies": {"dlpm": 5}}, "policies.dlpm .*must be a table of options"),
        ({}, {"policies": ["a", "a"], "policy.a.x": "1"}, "'a' is selected 2 times"),
        ({"ENGINE_SCHEDULER__": "x"}, {}, "unknown key 'scheduler.' .environment ENGINE_SCHEDULER__."),
        ({}, {"scheduler": ""}, "must be a plugin's name"),
        ({"ENGINE_KV_MEMORY": "much"}, {}, "kv_memory .environment ENGINE_KV_MEMORY.: 'much' is not a size"),
        ({}, {"num_pages": "0"}, "num_pages .flag --num-pages."),
    ],
)
def test_mistakes_name_key_and_origin(env, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_config(env=env, flags=flags)


def test_options_are_for_whoever_is_selected_at_last():
    env = {"ENGINE_SCHEDULER__POLICY": "lpm"}
    assert load_config(env=env, flags={"scheduler": "radix"}).config.scheduler.options == {"policy": "lpm"}
    named = {**env, "ENGINE_SCHEDULER": "radix"}
    assert load_config(env=named).config.scheduler.options == {"policy": "lpm"}
    dropped = load_config(env=named, flags={"scheduler": "unified"})
    assert dropped.config.scheduler.options == {}
    assert dropped.origins == {"scheduler": "flag --scheduler"}


def test_none_and_truth_in_text():
    loaded = load_config(env={"ENGINE_NUM_PAGES": "none", "ENGINE_OVERLAP": "on", "ENGINE_API_KEY": "none"})
    assert (loaded.config.num_pages, loaded.config.overlap, loaded.config.api_key) == (None, True, "none")


def test_flags_and_variables_of_a_key():
    assert flag_of("policies.fair-share.prompt_weight") == "--policy.fair-share.prompt-weight"
    assert flag_of("max_running") == "--max-running"
    assert variable_of("policies.fair-share.prompt_weight") == "ENGINE_POLICIES__FAIR_SHARE__PROMPT_WEIGHT"
    assert variable_of("scheduler.policy") == "ENGINE_SCHEDULER__POLICY"
