"""Options of the selected plugins: checked with their origins, all values told, secrets hidden."""

from __future__ import annotations

import pytest
from pydantic import Field, SecretStr, model_validator

from engine.core import ConfigError, EngineConfig, PluginError, PluginOptions, Policy, assemble, load_config
from engine.core.effective import Effective
from engine.core.registry import Registry


class Guarded(Policy):
    """Has a secret, a required option and one that is something by default."""

    name = "guarded"

    class Options(PluginOptions):
        token: SecretStr | None = Field(None, description="hidden")
        must: int = Field(description="required")
        limit: int | None = Field(4, description="none: no limit")


class Agreeing(Policy):
    """Its options must agree."""

    name = "agreeing"

    class Options(PluginOptions):
        low: int = Field(0, description="at least")
        high: int = Field(9, description="at most")

        @model_validator(mode="after")
        def _agree(self):
            if self.low > self.high:
                raise ValueError(f"low {self.low} is above high {self.high}")
            return self


GUARDED = f"{__name__}:Guarded"


def effective(**flags):
    return Effective(load_config(flags={"executor": "sim", **flags}))


def guarded(**options):
    return effective(policies=[{"name": GUARDED, **options}])


def test_every_option_is_told_with_its_origin():
    found = effective(**{"scheduler": "radix", "scheduler.policy": "lpm"})
    values = dict(found.values())
    assert (values["scheduler"], values["scheduler.policy"], values["scheduler.seed"]) == ("radix", "lpm", 0)
    assert found.origins["scheduler.policy"] == "flag --scheduler.policy"
    assert found.origins["scheduler.seed"] == "default"
    assert set(found.origins) == set(values)
    assert [chosen.found.role for chosen in found.plugins] == [
        "scheduler",
        "kvcache",
        "grammar",
        "frontend",
        "tool_parser",
        "executor",
    ]


def test_text_is_typed():
    found = effective(**{"policies": ["fair-share"], "policies.fair-share.weights": "a=2,b=3"})
    assert dict(found.values())["policies.fair-share.weights"] == {"a": 2.0, "b": 3.0}


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        ({"executor.step_mss": "1"}, ConfigError, "'step_mss' .flag --executor.step-mss.: did you mean 'step_ms'"),
        ({"executor.step_ms": "soon"}, ConfigError, "option step_ms .flag --executor.step-ms.: .*got 'soon'"),
        ({"policies": ["dlpm"], "policies.dlpm.quantum": "0"}, ConfigError, "flag --policy.dlpm.quantum.*greater"),
        ({"scheduler": "radixx"}, PluginError, "did you mean 'radix'"),
        ({"policies": ["fair-share"], "policies.fair-share.weights": "a"}, ConfigError, "option weights.*no value"),
        ({"policies": [GUARDED]}, ConfigError, "option must: is required; set it with --policy"),
        (
            {"policies": [{"name": f"{__name__}:Agreeing", "low": 10}]},
            ConfigError,
            "policy '.*Agreeing': low 10 is above high 9$",
        ),
        ({"policies": [{"name": GUARDED, "must": 1, "token": 7}]}, ConfigError, "option token .*valid string$"),
    ],
)
def test_mistakes_name_their_origin(flags, error, words):
    with pytest.raises(error, match=words):
        effective(**flags)


def test_commands_check_what_they_use():
    loaded = load_config(flags={"executor": "sim", "frontend": "nobody"})
    Effective(loaded, fields=("scheduler", "executor"))
    with pytest.raises(PluginError, match="unknown frontend"):
        Effective(loaded)


def test_secrets_are_hidden():
    found = guarded(must=1, token="sesame")
    assert dict(found.values())[f"policies.{GUARDED}.token"] == "***"
    assert "sesame" not in found.as_toml()
    assert "# token is secret and not shown: set it" in found.as_toml()
    assert dict(effective(api_key="sesame").values())["api_key"] == "***"


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"executor": "torch", "scheduler": "sglang", "scheduler.chunked_prefill_size": "none", "num_pages": 9},
        {"policies": ["fair-share", "dlpm"], "policies.fair-share.weights": 'a=2,"b c"=3', "host": "::1"},
        {"policies": [{"name": "random-leaf", "seed": 1}, {"name": "random-leaf", "seed": 2}], "overlap": "true"},
        {"policies": [{"name": GUARDED, "must": "3", "limit": "none"}]},
        {"scheduler.policy": "priority", "attention": {"name": "elsewhere", "x": 'a"\n'}},
    ],
)
def test_the_file_that_is_printed_configures_the_same(flags, tmp_path):
    found = effective(**flags)
    file = tmp_path / "engine.toml"
    file.write_text(found.as_toml())
    again = Effective(load_config(file=file))
    assert dict(again.values()) == dict(found.values())
    assert [chosen.options for chosen in again.plugins] == [chosen.options for chosen in found.plugins]
    assert set(again.origins.values()) <= {f"file {file}", "default"}
    assert again.as_toml() == found.as_toml()


def test_a_secret_of_a_plugin_is_shown_nowhere():
    token = {"name": "local", "token": "between us"}
    core = assemble(EngineConfig(executor="sim", connectors=[token]))
    try:
        shown = core.describe()
        assert "between us" not in repr(shown)
        assert "between us" not in repr(core.stats())
    finally:
        core.close()
    loaded = load_config(flags={"connectors": "local", "connectors.local.token": "between us"})
    assert "between us" not in Effective(loaded, Registry()).as_toml()
