"""The contract: its versions and deprecations, capabilities resolved at the start, every hook and role exercised."""

from __future__ import annotations

import logging
import warnings
from types import MappingProxyType

import pytest

from engine.core import (
    API_VERSION,
    ConfigError,
    EngineConfig,
    KVCache,
    PluginDeprecationWarning,
    PluginError,
    Policy,
    SamplingParams,
    Scheduler,
    assemble,
    hookimpl,
)
from engine.core.capabilities import report
from engine.core.contract import CONTRACT, Contract, DeprecatedField
from engine.core.hooks import HookBus
from engine.core.registry import Registry, build, make
from engine.core.request import Request
from engine.core.version import DEPRECATIONS, Deprecation, split
from engine.plugins.kvcache.paged import PagedCache
from engine.plugins.schedulers.unified import UnifiedScheduler
from engine.testing import make_core

HERE = __name__


class Reverse(Policy):
    """The last to come goes first."""

    name = "reverse"

    @hookimpl
    def order(self, waiting):
        return list(reversed(waiting))


def started(core, count=3):
    names = []
    for number in range(count):
        core.add([number] * 4, SamplingParams(max_tokens=1), request_id=f"r{number}")
    while core.has_work:
        names += [delta.request_id for delta in core.step() if delta.finish]
    return names


@pytest.fixture
def offer(monkeypatch):
    """Make this process offer another contract."""

    def offer(version, *deprecations):
        contract = Contract(version, deprecations)
        monkeypatch.setattr("engine.core.hooks.CONTRACT", contract)
        monkeypatch.setattr("engine.core.registry.CONTRACT", contract)
        return contract

    return offer


@pytest.fixture
def local(monkeypatch):
    """Put a class where ``select`` finds it; returns its name."""
    import sys
    import types

    module = types.ModuleType("acme_contract")
    monkeypatch.setitem(sys.modules, "acme_contract", module)

    def put(cls):
        cls.__module__ = "acme_contract"
        setattr(module, cls.__name__, cls)
        return f"acme_contract:{cls.__name__}"

    return put


# ---- versions


@pytest.mark.parametrize(
    ("version", "wanted", "runs"),
    [
        ("1.0", ">=1.0,<2", True), ("1.3", ">=1.0,<2", True), ("1.3", ">=1.3", True), ("1.3", "~=1.2", True),
        ("1.3", "==1.2", True), ("1.3", "<1.3", True), ("1.3", ">=1.2,<1.3", True), ("1.3", "", True),
        ("1.3", "==1.1", False), ("1.3", "<1.2", False), ("1.3", ">=1.4", False), ("1.3", ">1.3", False),
        ("1.3", ">=2", False), ("1.3", "<1", False), ("2.0", ">=1.0,<2", False), ("2.0", "==1.9", False),
        ("1.3", "!=1.3", False), ("1.3", ">=1.0,!=1.3", False), ("1.0", "<1.0", False), ("1.10", "==1.9", True),
        ("1.3", "one", False), ("1.3", "1.3", False), ("1.3", None, False), ("1.3", 1.3, False),
    ],
)  # fmt: skip
def test_who_runs_with_which_contract(version, wanted, runs, local):
    made = []

    class Versioned(Reverse):
        requires_api = wanted

        def __init__(self, options):
            made.append(1)
            super().__init__(options)

    registry = Registry([], contract=Contract(version))
    name = local(Versioned)
    if runs:
        build(registry.select("policy", name), EngineConfig(policies=[name]).policies[0])
        assert made == [1]
        return
    with pytest.raises(PluginError, match="written for contract|not a version range") as info:
        registry.select("policy", name)
    assert made == [], "it is refused before it is constructed"
    if isinstance(wanted, str) and wanted not in ("one", "1.3"):
        assert f"this engine offers {version}" in str(info.value)
        assert f"for {version}" in str(info.value)


def test_the_contract_in_force_is_that_of_the_version_module():
    assert CONTRACT.version == API_VERSION
    assert split(API_VERSION) >= (1, 0)
    for item in DEPRECATIONS:
        major, minor = split(item.removed)
        assert (major, minor + 1) >= split(API_VERSION), f"{item}: its time is over, take it out of the table"


# ---- deprecations


QUEUE = Deprecation("parameter", "order", "queue", since="1.1", instead="waiting")
LENGTH = Deprecation("parameter", "order", "length", "1.1", "len(waiting)", adapt=lambda args: len(args["waiting"]))
LOOKUP = Deprecation("method", "KVCache", "lookup", since="1.1", instead="match")
PUBLISH_AT = Deprecation("attribute", "KVCache", "publish_at", since="1.1", instead="publish_when")
USER = Deprecation("field", "Request", "user", since="1.1", instead="metadata['tenant']")


class OldOrder(Policy):
    """Written for 1.0."""

    name = "old-order"
    lengths = []

    @hookimpl
    def order(self, queue, length):
        self.lengths.append((length, len(queue)))
        return list(reversed(queue))


class OldCache(PagedCache):
    """Written for 1.0: implements ``lookup``, and says ``publish_at``."""

    name = "old-cache"
    publish_at = "committed"
    looked = 0
    match = KVCache.match  # as if it had never heard of it

    def lookup(self, request):
        self.looked += 1
        return PagedCache.match(self, request)


def test_what_is_deprecated_works_for_one_minor_version(offer, local, caplog):
    offer("1.1", QUEUE, LENGTH, LOOKUP, PUBLISH_AT)
    policy, cache = local(OldOrder), local(OldCache)
    config = EngineConfig(executor="sim", policies=[policy], kvcache=cache, max_running=1, num_pages=32)
    with caplog.at_level(logging.WARNING), pytest.warns(PluginDeprecationWarning) as told:
        core = assemble(config)
    words = sorted(str(item.message) for item in told)
    assert len(words) == 2, "once a plugin"
    assert "kvcache 'acme_contract:OldCache' of local code uses what contract 1.1 deprecates: " in words[0]
    assert "method 'lookup' of KVCache (deprecated in 1.1, gone in 1.2): use match" in words[0]
    assert "attribute 'publish_at' of KVCache (deprecated in 1.1, gone in 1.2): use publish_when" in words[0]
    assert "parameter 'queue' of hook 'order' (deprecated in 1.1, gone in 1.2): use waiting" in words[1]
    assert "parameter 'length' of hook 'order'" in words[1]
    assert caplog.text.count("PluginDeprecationWarning") == 0
    assert caplog.text.count("deprecates") == 2
    notes = core.describe()["report"]["notes"]
    assert any("'lookup'" in note for note in notes)
    assert any("'queue'" in note for note in notes)
    assert core.kv.publish_when == "committed"
    OldOrder.lengths.clear()
    assert started(core) == ["r2", "r0", "r1"]  # the queue keeps an order, and it is reversed again
    assert core.kv.looked >= 3
    assert OldOrder.lengths
    assert all(length == count for length, count in OldOrder.lengths)
    assert core.hooks.faults() == []
    core.close()
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        assemble(config).close()
    assert again == [], "told once a plugin, not once an engine"


def test_it_is_told_where_plugins_are_given_as_instances_too(offer):
    offer("1.1", QUEUE, LENGTH)

    class Older(OldOrder):
        pass

    with pytest.warns(PluginDeprecationWarning, match="plugin 'old-order' uses what contract 1.1 deprecates"):
        core = make_core(policies=[Older()], max_running=1)
    assert started(core) == ["r2", "r0", "r1"]  # the queue keeps an order, and it is reversed again


@pytest.mark.parametrize("version", ["1.2", "1.3"])
@pytest.mark.parametrize(("cls", "role", "word"), [(OldOrder, "policy", "queue"), (OldCache, "kvcache", "lookup")])
def test_what_is_gone_is_refused_with_what_to_use(offer, local, version, cls, role, word):
    offer(version, QUEUE, LOOKUP)
    with pytest.raises(PluginError, match=rf"{role} .*it uses .*'{word}' .*gone in 1.2\): use (waiting|match)"):
        Registry().select(role, local(cls))
    if cls is OldOrder:
        with pytest.raises(PluginError, match="it uses parameter 'queue'"):
            make_core(policies=[OldOrder()])


def test_what_will_be_deprecated_is_not_yet():
    assert Contract("1.0", [QUEUE, LOOKUP]).uses(OldCache) == ()
    with pytest.raises(PluginError, match="queue"):
        HookBus([UnifiedScheduler(), OldOrder()], contract=Contract("1.0", [QUEUE]))


def test_who_uses_nothing_old_is_told_nothing_and_stays_as_it_is():
    contract = Contract("1.1", [QUEUE, LENGTH, LOOKUP, PUBLISH_AT])
    for cls in (Reverse, PagedCache, UnifiedScheduler):
        assert contract.uses(cls) == ()
        assert contract.adapt(cls) is cls
        contract.warn(cls, "x")


def test_a_list_of_plugins_shows_who_uses_what_is_deprecated(offer, monkeypatch, tmp_path):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine.policies]\nold = acme_old_order:P\n")
    (tmp_path / "acme_old_order.py").write_text(
        "from engine.core import Policy, hookimpl\nclass P(Policy):\n    'Old.'\n    name = 'old'\n"
        "    @hookimpl\n    def order(self, queue):\n        return queue\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    offer("1.1", QUEUE)
    (line,) = [line for line in Registry().listing() if line.name == "old"]
    assert line.status == "ok"
    assert line.notes == (str(QUEUE),)
    assert str(QUEUE) in line.summary


def test_a_field_that_is_deprecated_answers_and_names_who_reads_it(monkeypatch):
    field = DeprecatedField(USER, lambda request: request.metadata["tenant"])
    monkeypatch.setattr(Request, "user", field, raising=False)
    core = make_core()
    request = core.add([1], metadata={"tenant": "ann"})
    with pytest.warns(PluginDeprecationWarning, match=f"{HERE} reads field 'user' of Request .*gone in 1.2"):
        assert request.user == "ann"
    assert request.user == "ann", "told once a reader"


# ---- capabilities


class Needs(Policy):
    name = "needs"
    origin = "acme 2.0"
    requires = frozenset({"prefix-cache", "teleport"})

    @hookimpl
    def commit(self):
        pass


class Offers(Needs):
    name = "offers"
    requires = frozenset()
    provides = frozenset({"teleport"})


def test_the_report_says_who_provides_and_requires_what():
    found = report([make("scheduler", "unified"), make("kvcache", "paged"), Needs(), Offers()])
    assert found.ok
    assert {item.name: (item.providers, item.requirers) for item in found.capabilities} == {
        "prefix-cache": (("kvcache 'paged'",), ("policy 'needs'",)),
        "teleport": (("policy 'offers'",), ("policy 'needs'",)),
    }
    text = found.text()
    assert f"contract {API_VERSION}" in text
    assert "plugin policy 'needs' from acme 2.0" in text
    assert "capability teleport: provided by policy 'offers', required by policy 'needs'" in text


def test_what_is_missing_names_plugin_distribution_and_who_would_provide_it():
    class Blind(Needs):
        requires = frozenset({"prefix-cache"})

    plugins = [make("scheduler", "unified"), Blind()]
    found = report(plugins, Registry())
    assert not found.ok
    (missing,) = found.missing
    assert (missing.capability, missing.plugin, missing.distribution) == ("prefix-cache", "policy 'needs'", "acme 2.0")
    assert missing.fix == (
        "select kvcache 'paged' (sixhooks) or kvcache 'radix' (sixhooks), or leave out policy 'needs'"
    )
    assert "capability prefix-cache: PROVIDED BY NOBODY, required by policy 'needs'" in found.text()
    assert "MISSING policy 'needs' of acme 2.0 requires prefix-cache" in found.text()
    with pytest.raises(PluginError, match="no installed plugin does either: leave out policy 'needs'"):
        report([make("kvcache", "paged"), Needs()], Registry()).raise_if_not_ok()


def test_a_start_is_refused_before_the_model_is_loaded(local, monkeypatch):
    from engine.plugins.executors.sim import SimExecutor

    monkeypatch.setattr(SimExecutor, "load", lambda self: pytest.fail("the model is loaded"))
    with pytest.raises(PluginError, match="requires teleport, which no selected plugin provides"):
        assemble(EngineConfig(executor="sim", policies=[local(Needs)]))


@pytest.mark.parametrize("capability", ["prefix-cache", "model-runner", "attention:decode"])
def test_a_policy_that_claims_what_only_a_role_can_have_is_refused(local, capability):
    class Liar(Policy):
        name = "liar"
        provides = frozenset({capability})

        @hookimpl
        def commit(self):
            pass

    words = f"policy 'liar' of local code claims to provide {capability}, which only"
    with pytest.raises(PluginError, match=words):
        assemble(EngineConfig(executor="sim", policies=[local(Liar)]))


class Silent(Policy):
    """Answers nothing."""

    name = "silent"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"policies": ["acme_contract:Silent"]}, "policy 'silent' answers no hook: it does nothing"),
        (
            {"kvcache": {"name": "paged", "enable_prefix_caching": False}, "policies": ["k-lpm"]},
            "kvcache 'paged' was told to remember no prefixes: policy 'k-lpm' will find nothing",
        ),
        ({"overlap": True, "executor": "acme_contract:Turns"}, "executor turns cannot overlap"),
    ],
)
def test_less_than_was_asked_for_is_said_loudly(config, words, local, caplog):
    from engine.plugins.executors.sim import SimExecutor

    class Turns(SimExecutor):
        name = "turns"
        overlaps = False

    local(Silent), local(Turns)
    with caplog.at_level(logging.WARNING):
        core = assemble(EngineConfig(**{"executor": "sim", "num_pages": 16, **config}))
    assert words in caplog.text
    assert any(words in downgrade for downgrade in core.describe()["report"]["downgrades"])
    assert len(started(core)) == 3
    core.close()


def test_the_description_travels_between_processes():
    from engine.core.serve.messages import Ready, decode_event, encode

    core = assemble(EngineConfig(executor="sim", policies=["k-lpm"], num_pages=16))
    ready = decode_event(encode(Ready(core.limits, core.model, core.describe())))
    assert ready.description["report"]["capabilities"][0]["requirers"] == ["policy 'k-lpm'"]
    assert ready.description["hooks"]["plan"] == ["scheduler unified"]
    assert ready.description["faults"] == []
    core.close()


def test_an_error_of_an_option_comes_before_any_start(local):
    class Picky(Reverse):
        name = "picky"

        def start(self, context):
            raise ConfigError("policy picky: not with these limits")

    with pytest.raises(ConfigError, match="not with these limits"):
        assemble(EngineConfig(executor="sim", policies=[local(Picky)]))


def test_nobody_can_add_a_role():
    from engine.core.protocols import GROUPS, ROLES

    assert isinstance(ROLES, MappingProxyType)
    with pytest.raises(TypeError):
        GROUPS["policy"] = "acme.policies"
    assert ROLES["scheduler"] is Scheduler
