"""Case B52: installed distributions of every broken kind. What is asked for refuses the start with cause and fix, what
is not asked for is one line, and the rest works. The distributions are real: metadata and modules on the path."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from engine.cli.doctor import plugins
from engine.core import EngineConfig, PluginError, SamplingParams, assemble
from engine.core.config import LoadedConfig
from engine.core.discovery import installed
from engine.core.importing import load
from engine.core.peek import locate, peek
from engine.core.protocols import GROUPS, ROLES
from engine.core.registry import BASES, Registry

GOOD = """
from engine.core import Policy, hookimpl
class P(Policy):
    "Last come, first served."
    name = "{name}"
    aliases = ("{name}-alias",)
    @hookimpl
    def order(self, waiting):
        return list(reversed(waiting))
"""


class Site:
    """A folder on the import path, to install distributions in."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def install(self, distribution, points, *, version="1.0", group="engine.policies", **modules):
        """Write metadata with entry points (name -> target) and modules (dotted by ``__``)."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in modules.items():
            self.module(name, source)
        return info

    def module(self, name, source):
        path = self.folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != self.folder:
            (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return path


@pytest.fixture
def site(tmp_path, monkeypatch):
    before = set(sys.modules)
    place = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(place.folder)
    yield place
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def refused(name, role="policy"):
    with pytest.raises(PluginError) as info:
        assemble(EngineConfig(executor="sim", policies=[name]) if role == "policy" else EngineConfig(**{role: name}))
    return str(info.value)


def line_of(name, registry=None):
    (line,) = [line for line in (registry or Registry()).listing() if line.name == name]
    return line


def serves(*policies):
    """An engine with these policies starts and answers."""
    core = assemble(EngineConfig(executor="sim", policies=policies, num_pages=16))
    core.add([1, 2, 3], SamplingParams(max_tokens=2))
    tokens = []
    while core.has_work:
        tokens += [token for delta in core.step() for token in delta.tokens]
    core.close()
    return tokens


BAD = GOOD.format(name="bad")
REPAIR = "repair or uninstall acme-bad"
RELEASE = "install a release of acme-bad for 1.0"
WORDS = "must be a set of words"
BROKEN = {  # what is wrong: the module, words of the cause, words of the fix
    "import error": ("import absent_library", "ModuleNotFoundError: No module named 'absent_library'", REPAIR),
    "raises": ("raise RuntimeError('half\\nway')", "RuntimeError: half way", REPAIR),
    "syntax": ("class P(:", "SyntaxError", REPAIR),
    "exits": ("import sys; sys.exit('no licence')", "SystemExit: no licence", REPAIR),
    "no class": ("P = 3", "3 is not a subclass of engine.core.Policy", ""),
    "a function": ("def P(): return None", "is not a subclass of engine.core.Policy", ""),
    "other role": ("from engine.core import Connector as P", "is not a subclass of engine.core.Policy", ""),
    "gone": ("Q = 1", "AttributeError", REPAIR),
    "newer version": (BAD + "    requires_api = '>=1.7'\n", "was written for contract >=1.7", RELEASE),
    "older version": (BAD + "    requires_api = '<1'\n", "was written for contract <1", RELEASE),
    "nonsense version": (BAD + "    requires_api = 7\n", "requires_api 7 is not a version range", ""),
    "misspelt hook": (
        BAD.replace("def order", "def odrer"),
        "the hook 'odrer', which does not exist: did you mean 'order'?", REPAIR,
    ),
    "misspelt parameter": (
        BAD.replace("(self, waiting)", "(self, wating)"),
        "takes 'wating', which the hook does not have: did you mean 'waiting'?", REPAIR,
    ),
    "unmarked hook": (BAD.replace("    @hookimpl\n", ""), "'order' is not decorated with hookimpl", REPAIR),
    "letters": (BAD + "    provides = 'prefix-cache'\n", f"its provides {WORDS}", ""),
    "numbers": (BAD + "    requires = {1, 2}\n", f"its requires {WORDS}", ""),
    "no options": (BAD + "    Options = dict\n", "its Options are not a subclass of engine.core.PluginOptions", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_is_refused_when_asked_for_and_a_line_when_not(site, kind):
    source, cause, fix = BROKEN[kind]
    site.install("acme-bad", {"bad": "acme_bad:P"}, acme_bad=source)
    site.install("acme-good", {"good": "acme_good:P"}, acme_good=GOOD.format(name="good"))
    words = refused("bad")
    assert "policy 'bad' of acme-bad" in words
    assert cause in words
    assert fix in words
    line = line_of("bad")
    assert (line.status, line.distribution) == ("broken", "acme-bad")
    assert cause in line.cause
    assert "\n" not in line.cause
    assert line_of("good").status == "ok"
    assert len(serves("good")) == 2


def test_a_name_that_nobody_has(site):
    site.install("acme-good", {"good": "acme_good:P"}, acme_good=GOOD.format(name="good"))
    assert refused("godo") == "unknown policy 'godo': did you mean 'good'?"
    assert "'radix' is a kvcache and a scheduler" in refused("radix")


def test_two_distributions_with_one_name(site):
    site.install("acme", {"good": "acme:P"}, acme=GOOD.format(name="good"))
    site.install("zenith", {"good": "zenith:P"}, zenith=GOOD.format(name="good"))
    words = refused("good")
    assert (
        "provided twice, by acme (acme:P) and zenith (zenith:P): uninstall one, or select it as module:Class" in words
    )
    lines = [line for line in Registry().listing() if line.name == "good"]
    assert [(line.status, line.distribution) for line in lines] == [("duplicate", "acme"), ("duplicate", "zenith")]
    assert "zenith (zenith:P)" in lines[0].cause
    assert len(serves("zenith:P")) == 2
    assert len(serves()) == 2


def test_the_order_of_the_list_is_that_of_names_and_not_of_the_folder(site):
    for name in ("zeta", "alpha", "mid"):
        site.install(f"acme-{name}", {name: f"acme_{name}:P"}, **{f"acme_{name}": GOOD.format(name=name)})
    names = [line.name for line in Registry().listing() if line.distribution.startswith("acme")]
    assert names == ["alpha", "mid", "zeta"]
    policies = [line.name for line in Registry().listing() if line.role == "policy"]
    assert policies == sorted(policies)


# ---- stale metadata


def test_a_stale_twin_that_points_nowhere_is_passed_over_and_named(site, caplog):
    site.install("acme", {"good": "acme_old:P", "only-old": "acme_old:Q"}, version="1.0")
    site.install("acme", {"good": "acme_new:P"}, version="1.1", acme_new=GOOD.format(name="good"))
    with caplog.at_level(logging.WARNING):
        assert len(serves("good")) == 2
    note = "acme is recorded 2 times (1.1 and 1.0): pip install --force-reinstall acme"
    assert f"policy 'good' of acme 1.1: {note}" in caplog.text
    assert line_of("good").notes == (note,)
    assert (line_of("good").status, line_of("good").version) == ("ok", "1.1")
    words = refused("only-old")
    assert "policy 'only-old' of acme cannot be imported from acme_old:Q: ModuleNotFoundError" in words
    assert words.endswith(note)
    assert line_of("only-old").status == "broken"


def test_the_newer_twin_may_be_the_stale_one(site):
    site.install("acme", {"good": "acme_new:P"}, version="1.10")
    site.install("acme", {"good": "acme_old:P"}, version="1.9", acme_old=GOOD.format(name="good"))
    assert Registry().select("policy", "good").version == "1.9"
    assert len(serves("good")) == 2


def test_twins_that_both_work_and_disagree_are_refused(site):
    site.install("acme", {"good": "acme_new:P"}, version="1.10", acme_new=GOOD.format(name="good"))
    site.install("acme", {"good": "acme_old:P"}, version="1.9", acme_old=GOOD.format(name="good"))
    words = refused("good")
    assert "provided twice, by acme (acme_new:P) and acme (acme_old:P)" in words
    assert "pip install --force-reinstall acme" in words


def test_twins_do_not_depend_on_the_order_of_the_folder(site, monkeypatch):
    import engine.core.discovery as discovery

    site.install("acme", {"good": "acme_p:P"}, version="1.9", acme_p=GOOD.format(name="good"))
    site.install("acme", {"good": "acme_p:P"}, version="1.10")
    forwards = list(discovery.distributions())
    for order in (forwards, forwards[::-1]):
        monkeypatch.setattr(discovery, "distributions", lambda order=order: order)
        (entry,) = [entry for entry in installed(GROUPS) if entry.name == "good"]
        assert entry.version == "1.10"


def test_what_an_earlier_folder_hides_is_not_there(site, tmp_path, monkeypatch):
    site.install("acme", {"good": "acme_p:P", "removed": "acme_p:P"}, version="1.0", acme_p=GOOD.format(name="good"))
    first = Site(tmp_path / "first")
    first.install("acme", {"good": "acme_p:P"}, version="2.0", acme_p=GOOD.format(name="good"))
    monkeypatch.syspath_prepend(first.folder)
    monkeypatch.syspath_prepend(first.folder)  # twice on the path is once
    assert line_of("good").version == "2.0"
    assert line_of("good").notes == ()
    assert "unknown policy 'removed'" in refused("removed")


# ---- imports


def test_a_slow_import_is_not_paid_for_unless_selected_and_then_named(site, caplog):
    slow = "import time\ntime.sleep(0.3)\n" + GOOD.format(name="slow")
    site.install("acme-slow", {"slow": "acme_slow:P"}, acme_slow=slow)
    site.install("acme-good", {"good": "acme_good:P"}, acme_good=GOOD.format(name="good"))
    assert len(serves("good")) == 2
    assert len(serves("good-alias")) == 2, "an alias is found without importing who does not have it"
    assert Registry().providers("teleport") == []
    refused("godo")
    assert "acme_slow" not in sys.modules
    with caplog.at_level(logging.WARNING):
        Registry(slow_import=0.2).select("policy", "slow")
        Registry(slow_import=0.2).select("policy", "slow")
    assert caplog.text.count("policy 'slow' of acme-slow took 0.") == 1


def test_the_contract_version_is_checked_before_anything_runs(site):
    source = "SIDE = open(__file__ + '.ran', 'w').close()\n" + GOOD.format(name="old") + "    requires_api = '<1'\n"
    site.install("acme-old", {"old": "acme_old:P"}, acme_old=source)
    assert "was written for contract <1" in refused("old")
    assert not (site.folder / "acme_old.py.ran").exists()
    assert "acme_old" not in sys.modules


def test_the_contract_version_is_checked_before_construction_where_only_the_class_knows_it(site):
    source = (
        GOOD.format(name="old")
        + "    requires_api = ''.join(['<', '1'])\n    def __init__(self, options):\n        1 / 0\n"
    )
    site.install("acme-old", {"old": "acme_old:P"}, acme_old=source)
    assert peek("acme_old:P", BASES).requires_api is None
    words = refused("old")
    assert "was written for contract <1" in words
    assert "ZeroDivisionError" not in words


HALF = """
    import sys
    sys.path.append("/nowhere-acme")
    sys.meta_path.append(type("Finder", (), {"find_spec": staticmethod(lambda *_: None)}))
    import acme_half.inner
    import engine.core.protocols as protocols
    protocols.GROUPS["policy"] = "acme.policies"
"""


def test_half_a_registration_is_rolled_back(site):
    site.install("acme-half", {"half": "acme_half.outer:P"}, acme_half__outer=HALF, acme_half__inner="STARTED = 1")
    path, finders, groups, roles = list(sys.path), list(sys.meta_path), dict(GROUPS), dict(ROLES)
    words = refused("half")
    assert "TypeError: 'mappingproxy' object does not support item assignment" in words
    assert not [name for name in sys.modules if name.startswith("acme_half")]
    assert (sys.path, sys.meta_path, dict(GROUPS), dict(ROLES)) == (path, finders, groups, roles)
    site.module(
        "acme_half__outer", GOOD.format(name="half") + "# repaired, and longer than it was before the repair\n" * 20
    )
    assert len(serves("half")) == 2, "once repaired it works in the same process"


def test_a_failing_import_leaves_what_was_there_before(site):
    site.module("acme_kit__fine", "VALUE = 1")
    site.module("acme_kit__broken", "import acme_kit.fine\nimport acme_kit.extra\nraise OSError")
    site.module("acme_kit__extra", "VALUE = 2")
    fine = importlib.import_module("acme_kit.fine")
    package = sys.modules["acme_kit"]
    with pytest.raises(OSError):
        load("acme_kit.broken:P")
    assert sys.modules["acme_kit.fine"] is fine
    assert package.fine is fine
    assert not hasattr(package, "extra")
    assert "acme_kit.extra" not in sys.modules


CLOSING = """
    import threading
    from engine.core import Policy
    class {cls}(Policy):
        name = "{name}"
        def start(self, context):
            self.stop = threading.Event()
            self.thread = threading.Thread(target=self.stop.wait, name="acme {name}")
            self.thread.start()
            {then}
        def close(self):
            if hasattr(self, "stop"):
                self.stop.set()
                self.thread.join()
"""


def test_a_start_that_fails_closes_what_had_started(site):
    site.module("acme_two", CLOSING.format(cls="P", name="first", then="pass"))
    site.module("acme_three", CLOSING.format(cls="P", name="second", then="raise OSError('port in use')"))
    with pytest.raises(PluginError, match="policy 'second' of local code could not start: OSError: port in use"):
        assemble(EngineConfig(executor="sim", policies=["acme_two:P", "acme_three:P"]))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("acme")]


def test_what_was_made_is_closed_when_a_later_one_cannot_be_selected(site):
    site.module("acme_one", """
        from engine.core import Policy
        CLOSED = []
        class P(Policy):
            name = "p"
            def close(self):
                CLOSED.append(self.name)
                raise OSError("cannot even close")
    """)  # fmt: skip
    with pytest.raises(PluginError, match="unknown policy 'absent'"):
        assemble(EngineConfig(executor="sim", policies=["acme_one:P", "absent"]))
    assert sys.modules["acme_one"].CLOSED == ["p"]


def test_an_abstract_role_and_a_target_without_a_class(site):
    site.install("acme", {"half": "acme_s:S"}, group="engine.schedulers",
                 acme_s="from engine.core import Scheduler\nclass S(Scheduler):\n    name = 'half'\n")  # fmt: skip
    words = refused("half", "scheduler")
    assert "scheduler 'half' of acme does not implement plan, which its role scheduler needs" in words
    site.install("acme-none", {"none": "acme_s"})
    assert "'acme_s' names no class" in refused("none")


def test_an_executor_that_answers_hooks_is_told_that_it_is_not_asked(site):
    site.install("acme", {"nosy": "acme_x:X"}, group="engine.executors", acme_x="""
        from engine.core import hookimpl
        from engine.plugins.executors.sim import SimExecutor
        class X(SimExecutor):
            name = "nosy"
            @hookimpl
            def commit(self, outcome): pass
    """)  # fmt: skip
    assert "answers the hook 'commit', but its role is not asked: make it a policy" in refused("nosy", "executor")


# ---- what the source says


def test_peeking_reads_literals_and_nothing_runs(site):
    site.module("acme_peek__deep", """
        from engine import core
        raise SystemExit("not to be run")
        class A(core.Policy):
            aliases = ("a", "b")
            provides: frozenset[str] = frozenset({"x"})
            requires = {"y"}
            requires_api = ">=1.0,<2"
        class B(A):
            pass
        class C(core.Policy):
            provides = frozenset(WORDS)
        class D(core.Policy):
            "Nothing said: the defaults hold."
    """)  # fmt: skip
    seen = {name: peek(f"acme_peek.deep:{name}", BASES) for name in "ABCDE"}
    assert (seen["A"].aliases, seen["A"].provides, seen["A"].requires) == (("a", "b"), {"x"}, {"y"})
    assert seen["A"].requires_api == ">=1.0,<2"
    assert seen["B"].aliases is None, "inherited: unknown"
    assert seen["C"].provides is None, "computed: unknown"
    assert (seen["D"].aliases, seen["D"].provides) == ((), frozenset())
    assert seen["E"].aliases is None
    assert locate("acme_peek.deep:A").origin.endswith("deep.py")
    assert locate("acme_peek.nowhere:A") is None
    assert not [name for name in sys.modules if name.startswith("acme_peek")]


def test_peeking_agrees_with_every_built_in_class():
    registry = Registry()
    for role, name, distribution in registry.owners():
        if distribution == "sixhooks":
            cls = registry.select(role, name).cls
            said = peek(f"{cls.__module__}:{cls.__qualname__}", BASES)
            if not set(cls.__bases__) & set(ROLES.values()):
                assert said.aliases is None, "inherited from who knows whom: unknown"
                continue
            assert said.aliases == tuple(cls.aliases), name
            assert said.provides == cls.provides, name


# ---- the commands


@pytest.fixture
def command(site):
    """Run the command line where the site is on the path."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", "from engine.cli import main; main()", *arguments],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONPATH": str(site.folder), "COLUMNS": "400"},
        )  # fmt: skip

    return run


def install_zoo(site):
    site.install("acme-good", {"good": "acme_good:P"}, acme_good=GOOD.format(name="good"))
    for number, (source, _, _) in enumerate(BROKEN.values()):
        site.install(f"acme-{number}", {f"bad-{number}": f"acme_{number}:P"}, **{f"acme_{number}": source})


def test_the_list_of_plugins_shows_all_and_works_whatever_is_broken(site, command):
    install_zoo(site)
    done = command("plugins", "--json", "--executor", "sim", "--policy", "good")
    assert done.returncode == 0, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)}
    assert (lines["good"]["status"], lines["good"]["active"]) == ("ok", True)
    for number, (_, cause, _) in enumerate(BROKEN.values()):
        line = lines[f"bad-{number}"]
        assert line["status"] == "broken"
        assert cause in line["cause"]


def findings(*policies):
    loaded = LoadedConfig(EngineConfig(executor="sim", policies=policies))
    return {(f.status, f"{f.name} {f.words}") for f in plugins(loaded)}


def test_doctor_lists_everything_that_does_not_work(site):
    install_zoo(site)
    seen = findings("good")
    assert ("ok", "policy good (acme-good 1.0)") in seen
    for number in range(len(BROKEN)):
        (words,) = [words for status, words in seen if f"bad-{number} of acme-{number} does not work: " in words]
        assert ("absent", words) in seen
    assert not [words for status, words in seen if status == "missing"]


def test_doctor_refuses_what_is_asked_for_and_does_not_work(site, command):
    source = GOOD.format(name="needy") + '    requires = frozenset({"teleport"})\n'
    site.install("acme", {"needy": "acme_needy:P"}, acme_needy=source)
    (words,) = [words for status, words in findings("needy") if status == "missing"]
    assert "policy 'needy' of acme 1.0 requires teleport, which no selected plugin provides" in words
    site.module("acme_needy", "raise OSError('gone')")
    done = command("doctor", "--executor", "sim", "--policy", "needy")
    assert done.returncode == 1
    assert "MISSING policy" in done.stdout
    assert "OSError: gone" in done.stdout
