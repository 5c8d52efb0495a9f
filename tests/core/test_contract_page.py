"""Nothing of the contract is undocumented or untried: each hook and each method of each role stands in docs/contract.md
with its exact signature, and is called here by the engine."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from pathlib import Path

import pytest

from engine import AsyncEngine
from engine.cli.serve import prepare
from engine.core import (
    Batch,
    Connector,
    EngineConfig,
    Policy,
    QueueFull,
    SamplingParams,
    Transfer,
    TransferEvent,
    assemble,
    hookimpl,
    hookspecs,
)
from engine.core.contract import HOOKS, parameters
from engine.core.protocols import ROLES, Plugin
from engine.core.registry import make
from engine.http import http_app
from engine.plugins.frontends.openai import OpenAIFrontend
from engine.testing import ScriptedModel, make_core

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "contract.md").read_text()


def section(name):
    found = re.search(rf"^### `{name}`\n(.*?)(?=^##)", PAGE + "\n## end", re.DOTALL | re.MULTILINE)
    assert found, f"docs/contract.md has no section on {name}"
    return found.group(1)


def signature(name, function):
    shown = inspect.signature(function)
    own = [parameter for parameter in shown.parameters.values() if parameter.name != "self"]
    return name + str(shown.replace(parameters=own)).replace("'", "")


def methods(cls):
    """The public methods that a role adds."""
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and inspect.isfunction(value)}


def example(name):
    blocks = re.findall(r"^```python\n(.*?)^```", section(name), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, f"{name} needs one example"
    return blocks[0]


# ---- documented


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_documented(hook):
    text = section(hook)
    assert f"```text\n{signature(hook, getattr(hookspecs, hook))}\n```" in text
    for row in ("answered by", "which answer counts", "calls", "after a fault", "returns"):
        if (hook, row) != ("commit", "returns"):
            assert re.search(rf"^\| {row} \| \S", text, re.MULTILINE), f"{hook}: {row}"
    for parameter in parameters(hook):
        assert re.search(rf"^\| `{parameter}` \| \S", text, re.MULTILINE), f"{hook}: {parameter}"
    first = getattr(hookspecs, hook).engine_spec["firstresult"]
    assert ("| which answer counts | first answer" in text) == first
    (purpose,) = re.findall(r"\A(.*?)\n\n", inspect.getdoc(getattr(hookspecs, hook)), re.DOTALL)
    assert " ".join(purpose.replace("``", "`").split()) in " ".join(text.split())
    assert f"def {hook}(" in example(hook)


def test_there_is_no_section_on_what_does_not_exist():
    sections = re.findall(r"^### `(\w+)`", PAGE, re.MULTILINE)
    assert sections == [*HOOKS, "Plugin", *[name for name in sections if name in {c.__name__ for c in ROLES.values()}]]
    assert {cls.__name__ for cls in ROLES.values()} <= set(sections)
    for cls in (Plugin, *ROLES.values()):
        named = set(re.findall(r"^- `(\w+)\(", section(cls.__name__), re.MULTILINE))
        assert named == set(methods(cls)), cls.__name__


@pytest.mark.parametrize("cls", [Plugin, *ROLES.values()], ids=lambda cls: cls.__name__)
def test_each_method_and_attribute_of_a_role_is_documented(cls):
    text = section(cls.__name__)
    for name, method in methods(cls).items():
        must = "required" if getattr(method, "__isabstractmethod__", False) else "optional"
        assert f"- `{signature(name, method)}` ({must}" in text, name
        assert method.__doc__, name
    for name in cls.__annotations__:
        if not name.startswith("_"):
            assert f"`{name}`" in text, name
    if methods(cls):
        assert f"({cls.__name__})" in example(cls.__name__) or cls is Plugin


def test_the_examples_of_the_hooks_are_those_of_their_specifications():
    """The classes of the same name do the same, so that neither goes stale unseen."""
    for hook in HOOKS:
        source = inspect.getdoc(getattr(hookspecs, hook))
        assert "Example::" in source
        assert f"def {hook}(self" in source


@pytest.mark.parametrize("number", range(PAGE.count("```python\n")))
def test_each_example_runs(number):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(blocks[number], f"contract.md[{number}]", "exec"), {"__name__": f"contract_{number}"})


# ---- untried


EXERCISES = {}


def exercises(hook):
    def register(function):
        EXERCISES[hook] = function
        return function

    return register


def asked(cls):
    """A plugin of a role that keeps what each hook was given, and the answers' kinds."""
    kept = []

    def answer(hook):
        names = parameters(hook)
        code = f"lambda self, {', '.join(names)}: kept.append(('{hook}', ({', '.join(names)},)))"
        return hookimpl(eval(code, {"kept": kept}))

    hooks = [hook for hook in HOOKS if hook != "plan"]
    return type("Asked", (cls,), {"name": "asked", **{hook: answer(hook) for hook in hooks}})(), kept


def busy(**more):
    core = make_core(num_pages=8, max_running=3, **more)
    for n in range(4):
        core.add([n] * 9, SamplingParams(max_tokens=12))
    while core.has_work:
        core.step()
    return core


@exercises("plan")
def exercise_plan():
    namespace = {"__name__": "example"}
    exec(example("plan"), namespace)
    steps = []
    real = namespace["Serial"]

    class Told(real):
        @hookimpl
        def plan(self, step):
            steps.append(step)
            return real.plan(self, step)

    core = busy(scheduler=Told())
    assert len(steps) == core.counters.steps > 3
    return [(step,) for step in steps]


def exercise_policy(hook):
    policy, kept = asked(Policy)
    busy(policies=[policy])
    return [args for name, args in kept if name == hook]


@exercises("order")
def exercise_order():
    given = exercise_policy("order")
    assert all(len(set(waiting)) == len(waiting) > 0 for _, waiting in given)
    return given


@exercises("admit")
def exercise_admit():
    given = exercise_policy("admit")
    assert len({request.id for _, request in given}) == 4
    return given


@exercises("evict")
def exercise_evict():
    given = exercise_policy("evict")
    assert {pool.kind for _, pool in given} == {"cache", "running"}
    assert all(need > 0 for need, _ in given)
    return given


@exercises("commit")
def exercise_commit():
    given = exercise_policy("commit")
    assert sum(len(outcome.finished) for (outcome,) in given) == 4
    return given


@exercises("transfer_kv")
def exercise_transfer():
    connector, kept = asked(Connector)
    core = make_core(connectors=[connector])
    core.add([1], request_id="a", params=SamplingParams(max_tokens=2))
    core.transfer(Transfer("t", "push", "a"))
    core.step()
    given = [args for name, args in kept if name == "transfer_kv"]
    assert given == [([Transfer("t", "push", "a")],)]
    return given


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_exercised(hook):
    """A hook without an exercise fails here; so does one that the engine never asks."""
    given = EXERCISES[hook]()
    assert given
    assert all(len(args) == len(parameters(hook)) for args in given)


class Calls:
    """(role, method) of every call that one of ours makes of a plugin while it is watched."""

    def __init__(self):
        self.seen = set()
        self._roles = {}

    def __enter__(self):
        sys.setprofile(self._watch)
        threading.setprofile(self._watch)

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _watch(self, frame, event, _):
        if event != "call" or frame.f_code.co_argcount == 0:
            return
        owner = frame.f_locals.get(frame.f_code.co_varnames[0])
        cls = type(owner)
        if cls not in self._roles:
            self._roles[cls] = [role for role, base in ROLES.items() if isinstance(owner, base)]
        caller = frame.f_back.f_globals.get("__name__", "") if frame.f_back is not None else ""
        if self._roles[cls] and caller.startswith(("engine.", "example")) and not caller.startswith("engine.testing"):
            self.seen |= {(role, frame.f_code.co_name) for role in self._roles[cls]}


def everyday():
    """A day in the life of an engine: prefixes, preemptions, failures, aborts, a full queue, drafts of nothing."""
    core = assemble(
        EngineConfig(executor="sim", scheduler="unified", policies=["k-lpm", "random-leaf"], page_size=4, max_running=3,
                     num_pages=10, max_waiting=4, max_batch_tokens=16, audit=True)
    )  # fmt: skip
    for n in range(4):
        core.add([1] * 8 + [n] * 5, SamplingParams(max_tokens=14, ignore_eos=True))
    with pytest.raises(QueueFull):
        core.add([1])
    core.step()
    core.abort("r2")
    while core.has_work:
        core.step()
    core.kv.reset()
    core.close()


def unsized():
    assemble(EngineConfig(executor="sim")).close()


def failing():
    core = make_core(executor=(model := ScriptedModel()), page_size=4)
    model.fail_next = 1
    core.add([1] * 9, SamplingParams(max_tokens=4))
    core.step()
    assert core.counters.failed_steps == 1


def slots():
    core = make_core(kvcache="radix", page_size=1, num_pages=200)
    for n in range(4):
        core.add([n] * 5, SamplingParams(max_tokens=8))
    while core.has_work:
        core.step()


def shortage():
    core = make_core(num_pages=10, page_size=4)
    for start in range(0, 300, 50):
        core.add(range(start, start + 21), SamplingParams(max_tokens=8))
    while core.has_work:
        core.step()


def looked_up():
    core = make_core(scheduler="radix", scheduler_options={"policy": "lpm"}, max_running=1)
    for n in range(4):
        core.add([1] * 8 + [n], SamplingParams(max_tokens=2), cache_ttl=60)
    while core.has_work:
        core.step()


def moved():
    class Mover(Connector):
        name = "mover"

        @hookimpl
        def transfer_kv(self, transfers):
            return [TransferEvent(wish.id, "done") for wish in transfers]

    core = make_core(connectors=[Mover()])
    core.add([1], SamplingParams(max_tokens=1), request_id="a")
    core.transfer(Transfer("t", "push", "a"))
    core.step()


def renewed():
    core = assemble(EngineConfig(executor="sim", policies=["k-lpm"], num_pages=16))
    core.add([1, 2], SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    core.update_weights(lambda weights: {**weights, "w": 1})
    core.stats()
    core.close()


def told():
    core = assemble(
        EngineConfig(executor="sim", cache_events="on", connectors=["host"], page_size=4, num_pages=16, audit=True)
    )
    core.add([1] * 9, SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    assert core.cache.explain([1] * 9)["cached_pages"] == 2
    assert len(core.cache.dump()["keys"]) == 2
    assert core.lens.look()["tree"] is None
    core.cache.flush(tiers=True)
    core.close()


def mounted():
    engine = AsyncEngine.launch(EngineConfig(executor="sim"), in_process=True)
    try:
        http_app(engine)
    finally:
        engine.shutdown()
    frontend = OpenAIFrontend()
    prepare(frontend, EngineConfig(api_key=("one", "two"), port=0))
    frontend.close()


def captured():
    backend = make("attention", "auto", {"order": ["torch"]})
    backend.prepare(device="cpu", dtype="float32")
    with pytest.raises(NotImplementedError, match="torch cannot be captured in graphs"):
        backend.plan_graph(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))


def pages_of_examples():
    for name in ("Scheduler", "Connector", "Attention", "Frontend", "GrammarCompiler", "ToolParser"):
        exec(compile(example(name), name, "exec"), {"__name__": "example"})


SCENARIOS = (
    everyday, unsized, failing, slots, shortage, looked_up, moved, renewed, told, mounted, captured, pages_of_examples,
)  # fmt: skip


def test_each_method_of_each_role_is_called():
    """A method that nothing calls is dead, one that these scenarios do not reach is untested."""
    import torch  # noqa: F401  (its import is not to be watched)

    calls = Calls()
    for scenario in SCENARIOS:
        with calls:
            scenario()
    wanted = {(role, name) for role, cls in ROLES.items() for name in methods(cls)}
    wanted |= {(role, name) for role in ("scheduler", "kvcache", "executor", "policy") for name in methods(Plugin)}
    assert wanted - calls.seen == set()
