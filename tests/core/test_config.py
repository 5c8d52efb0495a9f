"""Configuration: precedence, origins, and refusals that name the key."""

from __future__ import annotations

import pytest

from engine.core import ConfigError, EngineConfig, load_config
from engine.core.assemble import assemble, size_limits
from engine.core.config import parse_bytes
from engine.core.protocols import ModelInfo


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
    with pytest.raises(ConfigError, match="kv_memory"):
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
    class Sized:
        def default_pages(self, page_size):
            return None

    model = ModelInfo(name="m", vocab_size=10, max_model_len=100, kv_bytes_per_token=1024)
    limits = size_limits(EngineConfig(kv_memory="1MiB", page_size=16), model, Sized())
    assert limits.num_pages == 64
    with pytest.raises(ConfigError, match="does not hold one page of 16384 bytes"):
        size_limits(EngineConfig(kv_memory="1KiB", page_size=16), model, Sized())


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
