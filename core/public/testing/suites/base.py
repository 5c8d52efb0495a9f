"""What all suites share: which plugin is tried, in which situations, and how a suite runs without pytest."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

from engine.core.config import Selection
from engine.core.protocols import ROLES, Plugin
from engine.core.registry import Found, Registry, build
from engine.testing.guard import Violation
from engine.testing.workload import Situation, Workload


class Law(NamedTuple):
    """One rule in one situation. ``rule`` is the docstring of the test that checks it."""

    name: str
    rule: str
    situation: Any
    check: Callable[[], None]

    @property
    def where(self) -> str:
        """The test and its situation, as pytest names them."""
        return self.name if self.situation is None else f"{self.name}[{self.situation}]"


class Suite:
    """Subclass it in a test module, say which plugin, and pytest runs every rule of its role. Needs no pytest itself.

    Example::

        class TestMine(PolicySuite):
            plugin = "my_package:Mine"
            options = {"limit": 2}

    Class attributes:
        plugin: an entry-point name, ``pkg.module:Class``, or the class.
        options: its options.
        draft_options: options that it needs besides where an executor proposes up to three drafts a step.
        limits: arguments of ``make_core`` that it needs, e.g. ``{"max_batch_tokens": 64}``.
        seed: of the workloads.
    """

    role: ClassVar[str] = ""
    plugin: ClassVar[Any] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    draft_options: ClassVar[Mapping[str, Any]] = {}
    limits: ClassVar[Mapping[str, Any]] = {}
    seed: ClassVar[int] = 0
    origin: Found | None = None  # where ``plugin`` was found, if somebody looked already

    # ---- for subclasses

    @classmethod
    def situations(cls) -> list[Any]:
        """Where the rules that ask for one are tried; for most roles each is a ``Situation`` of a workload."""
        return []

    def notes(self) -> list[str]:
        """What ``check`` tells besides, of a plugin that broke no rule."""
        return []

    def found(self) -> Found:
        """The class that is tried, and where it comes from. Raises ``PluginError``."""
        if self.origin is None:  # looking takes a tenth of a second
            given = self.plugin
            by_name = isinstance(given, str)
            self.origin = Registry().select(self.role, given) if by_name else Found(self.role, given, "local code", "")
        return self.origin

    def make(self, **more: Any) -> Any:
        """A new instance with the suite's options. Raises ``ConfigError`` or ``PluginError``."""
        found = self.found()
        name = self.plugin if isinstance(self.plugin, str) else found.cls.name
        return build(found, Selection(name=name, options={**self.options, **more}))

    def plugins(self, situation: Situation) -> dict[str, Any]:
        """The plugin as an argument of ``make_core``."""
        return {self.role: self.make(**(self.draft_options if situation.drafts else {}))}

    def workload(self, situation: Situation, seed: int | None = None, requests: int = 18) -> Workload:
        """A hostile workload with the plugin in it, not run yet."""
        chosen = self.seed if seed is None else seed
        return Workload(chosen, situation, self.plugins(situation), self.limits, requests)

    @classmethod
    def teardown_class(cls) -> None:
        """What the rules of this suite shared is not needed any more; pytest and ``check`` call it."""

    # ---- rules of every role

    def test_it_can_be_selected(self) -> None:
        """A plugin has a name, says what it is, and its options have types, defaults and descriptions."""
        found = self.found()
        cls = found.cls
        if not issubclass(cls, ROLES[self.role]):
            raise Violation(f"{cls.__name__} is not a subclass of engine.core.{ROLES[self.role].__name__}")
        if not cls.name:
            raise Violation(f"{cls.__name__} has no name")
        if isinstance(self.plugin, str) and ":" not in self.plugin and self.plugin not in (cls.name, *cls.aliases):
            raise Violation(f"the entry point is {self.plugin!r}, and the class says {cls.name!r}")
        if not (cls.__doc__ or "").strip():
            raise Violation(f"{cls.__name__} has no docstring: 'engine plugins' shows its first line")
        for name, field in cls.Options.model_fields.items():
            if not field.description:
                raise Violation(f"option {name!r} has no description")
        self.make()

    def test_its_capabilities_are_true(self) -> None:
        """Its capabilities are true: what it requires somebody provides, and only a KV cache claims prefix-cache."""
        found = self.found()
        offered = set(found.cls.provides)
        if found.cls.requires - offered:
            offered |= self._offered()
        if missing := found.cls.requires - offered:
            raise Violation(f"it requires {', '.join(sorted(missing))}, which no installed plugin provides")
        if self.role != "kvcache" and "prefix-cache" in found.cls.provides:
            raise Violation(f"it is a {self.role} and claims to provide prefix-cache")

    @staticmethod
    def _offered() -> set[str]:
        """What all installed plugins provide."""
        registry = Registry()
        working = [line for line in registry.listing() if line.status == "ok"]
        return {offer for line in working for offer in registry.select(line.role, line.name).cls.provides}

    def test_it_leaves_no_thread_behind(self) -> None:
        """After close() nothing is left: no thread, and closing an engine that never stepped is fine."""
        before = set(threading.enumerate())
        plugin: Plugin = self.make()
        self.try_once(plugin)
        left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
        if left:
            raise Violation(f"threads are left after close(): {', '.join(sorted(left))}")

    def try_once(self, plugin: Plugin) -> None:
        """Start and close an engine around the plugin."""

    # ---- how it runs

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """pytest asks: a test that takes a ``situation`` runs in each of them."""
        if "situation" in metafunc.fixturenames:
            metafunc.parametrize("situation", self.situations(), ids=str)

    @classmethod
    def laws(cls) -> Iterator[Law]:
        """Every rule in every situation, the quick ones first, to be checked without pytest."""
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            names.update(dict.fromkeys(name for name in vars(base) if name.startswith("test_")))
        suite = cls()
        places = cls.situations()
        tests = {name: getattr(suite, name) for name in names}
        rules = {name: " ".join((inspect.getdoc(test) or name).split()) for name, test in tests.items()}
        placed = [name for name in names if "situation" in inspect.signature(tests[name]).parameters]
        quick = [name for name in names if name not in (*placed, "test_it_decides_the_same_again")]
        yield from (Law(name, rules[name], None, tests[name]) for name in quick)
        yield from (Law(name, rules[name], at, partial(tests[name], at)) for name in placed for at in places)
        rest = [name for name in names if name not in (*placed, *quick)]  # what breaks others, too, is told as theirs
        yield from (Law(name, rules[name], None, tests[name]) for name in rest)
