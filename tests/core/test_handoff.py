"""``role``: which side of a hand-off an engine is, said once for all its connectors."""

from __future__ import annotations

import pytest

from engine.core import ConfigError, EngineConfig, assemble, load_config
from engine.core.effective import Effective


def effective(**flags):
    return Effective(load_config(flags={"executor": "sim", **flags}))


def roles(config):
    core = assemble(config)
    try:
        return {name: said.get("role") for name, said in core.describe()["connectors"].items()}
    finally:
        core.close()


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_the_role_is_that_of_the_connectors_that_have_one(role):
    flags = {"role": role, "connectors": ["host", "local"]}
    found = effective(**flags)
    assert dict(found.values())["connectors.local.role"] == role
    assert found.origins["connectors.local.role"] == ("default" if role == "both" else "flag --role")
    assert roles(found.config) == {"host": None, "local": role}


def test_what_is_said_to_the_connector_itself_wins():
    found = effective(**{"role": "prefill", "connectors": ["local"], "connectors.local.role": "both"})
    assert dict(found.values())["connectors.local.role"] == "both"
    assert found.origins["connectors.local.role"] == "flag --connector.local.role"
    assert roles(found.config) == {"local": "both"}


def test_a_role_without_a_connector_that_hands_over_is_refused():
    words = r"role \(flag --role\): 'decode' needs a connector .*: .*--connector local"
    with pytest.raises(ConfigError, match=words) as told:
        effective(role="decode", connectors=["host"])
    assert "--connector host" not in str(told.value)
    with pytest.raises(ConfigError, match="'prefill' needs a connector"):
        assemble(EngineConfig(executor="sim", role="prefill"))


def test_a_role_that_there_is_not_is_refused_with_its_origin():
    with pytest.raises(ConfigError, match=r"role \(environment ENGINE_ROLE\): .*'prefill'"):
        load_config(env={"ENGINE_ROLE": "prefil"})


def test_a_printed_configuration_configures_the_same(tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text(effective(role="prefill", connectors=["local"]).as_toml())
    assert load_config(file=file).config.role == "prefill"
    assert roles(load_config(file=file, flags={"executor": "sim"}).config) == {"local": "prefill"}
