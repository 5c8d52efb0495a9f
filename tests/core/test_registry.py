"""Finding plugins: what is asked for and broken stops the start, what is not asked for is a line in a list."""

from __future__ import annotations

import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from engine.core import EngineConfig, PluginError, SamplingParams, Selection, assemble
from engine.core.capabilities import check_capabilities
from engine.core.registry import Registry, build


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Write a module on the import path; returns a function that makes an entry point to it."""

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


POLICY = """
from engine.core import Policy, hookimpl
class P(Policy):
    name = "p"
    requires_api = "{api}"
    @hookimpl
    def order(self, waiting):
        return list(reversed(waiting))
"""


def entry(name: str, value: str, group: str = "engine.policies") -> EntryPoint:
    return EntryPoint(name=name, value=value, group=group)


def test_built_ins_are_found_by_name_and_alias():
    registry = Registry()
    for role, name in [
        ("scheduler", "unified"), ("scheduler", "vllm"), ("scheduler", "radix"), ("scheduler", "sglang"),
        ("kvcache", "paged"), ("kvcache", "block-hash"), ("kvcache", "radix"), ("executor", "sim"),
    ]:  # fmt: skip
        found = registry.select(role, name)
        assert name in (found.cls.name, *found.cls.aliases)
        assert found.distribution == "sixhooks"


def test_every_built_in_is_listed_as_working():
    lines = Registry().listing()
    assert {line.status for line in lines if line.distribution == "sixhooks"} == {"ok"}
    assert all(line.summary for line in lines if line.distribution == "sixhooks")


def test_unknown_names_get_a_suggestion():
    with pytest.raises(PluginError, match="unknown kvcache 'pagde': did you mean 'paged'"):
        Registry().select("kvcache", "pagde")


def test_local_code_by_module_and_class(local):
    local("mine", POLICY.format(api=">=1.0,<2"))
    core = assemble(EngineConfig(executor="sim", policies=["mine:P"], max_running=1))
    for name in "ab":
        core.add([1], SamplingParams(max_tokens=1), request_id=name)
    assert core.step()[0].request_id == "b"
    assert any(p["name"] == "p" and p["distribution"] == "local code" for p in core.describe()["plugins"])
    core.close()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("absent_module:P", "cannot be imported from absent_module:P: ModuleNotFoundError"),
        ("mine:Q", "cannot be imported from mine:Q: AttributeError"),
        ("json:loads", "is not a subclass of engine.core.Policy"),
        ("engine.plugins.kvcache.paged:PagedCache", "is not a subclass of engine.core.Policy"),
    ],
)
def test_wrong_local_code(local, target, message):
    local("mine", POLICY.format(api=">=1.0,<2"))
    with pytest.raises(PluginError, match=message):
        Registry().select("policy", target)


def test_asked_for_and_broken_refuses_not_asked_for_is_a_line(local):
    local("broken", "raise RuntimeError('half installed')")
    local("fine", POLICY.format(api=">=1.0,<2"))
    registry = Registry([entry("bad", "broken:P"), entry("p", "fine:P")])
    with pytest.raises(PluginError, match="policy 'bad' .*RuntimeError: half installed.*repair or uninstall"):
        registry.select("policy", "bad")
    assert registry.select("policy", "p").cls.name == "p"
    lines = {line.name: line for line in registry.listing()}
    assert (lines["bad"].status, lines["p"].status) == ("broken", "ok")
    assert "half installed" in lines["bad"].cause


def test_two_of_one_name_name_both(local):
    local("one", POLICY.format(api=">=1.0,<2"))
    local("two", POLICY.format(api=">=1.0,<2"))
    registry = Registry([entry("p", "one:P"), entry("p", "two:P")])
    with pytest.raises(PluginError, match=r"provided twice, by .*one:P.* and .*two:P"):
        registry.select("policy", "p")
    assert {line.status for line in registry.listing()} == {"duplicate"}


@pytest.mark.parametrize("api", [">=2", "<1", "==0.9"])
def test_another_contract_version(local, api):
    local("old", POLICY.format(api=api))
    with pytest.raises(PluginError, match="was written for contract .*this engine offers 1.0"):
        Registry([entry("p", "old:P")]).select("policy", "p")


def test_a_constructor_that_raises(local):
    local(
        "raises", POLICY.format(api=">=1.0,<2") + "    def __init__(self, options):\n        raise OSError('no disk')\n"
    )
    found = Registry().select("policy", "raises:P")
    with pytest.raises(PluginError, match="OSError: no disk"):
        build(found, Selection(name="p"))


def test_capabilities_that_nobody_provides(local):
    local("needy", POLICY.format(api=">=1.0,<2") + '    requires = frozenset({"prefix-cache", "teleport"})\n')
    needy = build(Registry().select("policy", "needy:P"), Selection(name="p"))
    cache = build(Registry().select("kvcache", "paged"), Selection(name="paged"))
    with pytest.raises(
        PluginError, match="policy 'p' of local code requires teleport, which no selected plugin provides"
    ):
        check_capabilities([needy, cache])
