"""Version of the plugin contract (hooks, protocols and the types that they exchange), and what of it is on its way out.

The contract is ``MAJOR.MINOR``. A minor version adds, and may *deprecate*; a deprecated thing works for the minor
version that deprecates it and is gone in the next. So a plugin written for minor N-1 always runs on minor N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

API_VERSION = "1.0"

DeprecationKind = Literal["parameter", "method", "attribute", "field"]


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One thing of the contract that plugins should no longer use.

    Args:
        kind: ``parameter`` (of a hook), ``method`` (that a plugin of a role implements), ``attribute`` (that a plugin's
            class sets), ``field`` (of an exchanged object, that plugins read: see ``contract.DeprecatedField``).
        owner: the hook, role class or exchanged class that has it.
        name: what it was called.
        since: the contract version that deprecates it, as ``"1.1"``; it works there, and not in the next minor one.
        instead: what to use now. For a parameter, method or attribute that was renamed: the new name, which is all
            that is needed to keep the old one working.
        adapt: for a parameter that is more than renamed: the hook's arguments by name to its value.
    """

    kind: DeprecationKind
    owner: str
    name: str
    since: str
    instead: str
    adapt: Callable[[dict[str, Any]], Any] | None = None

    @property
    def removed(self) -> str:
        """The contract version that no longer has it."""
        major, minor = split(self.since)
        return f"{major}.{minor + 1}"

    def __str__(self) -> str:
        what = {"parameter": "parameter {} of hook {!r}", "field": "field {} of {}"}.get(
            self.kind, f"{self.kind} {{}} of {{}}"
        )
        when = f"deprecated in {self.since}, gone in {self.removed}"
        return f"{what.format(repr(self.name), self.owner)} ({when}): use {self.instead}"


def split(version: str) -> tuple[int, int]:
    """``"1.3"`` as (1, 3)."""
    major, minor = version.split(".")
    return int(major), int(minor)


DEPRECATIONS: tuple[Deprecation, ...] = ()
"""What this engine deprecates. An entry stays for one version after its removal: plugins that still use it are refused
in its words."""
