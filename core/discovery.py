"""What is installed: every entry point of our groups, read from metadata. Nothing is imported.

Python's own rule decides between distributions of one name: the first folder on the path wins, and what it hides is
not there. Two metadata folders of one distribution *beside each other* are no such case: an upgrade was interrupted,
and which of them Python would read depends on the file system. Both are read, newest first, and it is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from packaging.version import InvalidVersion, Version

from engine.core.peek import locate


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point: a role, a name, and where the class is. ``note`` says what is odd about its metadata."""

    role: str
    name: str
    target: str
    distribution: str
    version: str = ""
    note: str = ""


def installed(groups: Mapping[str, str]) -> list[Entry]:
    """Every entry point on the path, in no particular order.

    Args:
        groups: role -> entry-point group.
    """
    roles = {group: role for role, group in groups.items()}
    entries: list[Entry] = []
    for twins in _by_name(distributions()):
        found = [entry for each in twins for entry in _entries(each, roles)]
        entries += found if len(twins) == 1 else _settle(found, twins)
    return entries


def given(points: Iterable[EntryPoint], groups: Mapping[str, str]) -> list[Entry]:
    """Entry points handed over by the caller, those of other groups left out."""
    roles = {group: role for role, group in groups.items()}
    return [
        Entry(roles[point.group], point.name, point.value, *_identity(point.dist))
        for point in points
        if point.group in roles
    ]


def _identity(found: Distribution | None) -> tuple[str, str]:
    return ("unknown distribution", "") if found is None else (found.name, found.version)


def _entries(found: Distribution, roles: Mapping[str, str]) -> list[Entry]:
    points = [point for point in found.entry_points if point.group in roles]
    if not points:
        return []
    name, version = _identity(found)
    return [Entry(roles[point.group], point.name, point.value, name, version) for point in points]


def _by_name(found: Iterable[Distribution]) -> list[list[Distribution]]:
    """Distributions by name: those of the first folder on the path that has one, newest first."""
    folders: dict[str, str] = {}
    groups: dict[str, dict[str, Distribution]] = {}
    for each in found:
        path = getattr(each, "_path", None)
        stem = path.name if path is not None else f"{each.name}-{each.version}.dist-info"
        name = re.sub(
            r"[-_.]+", "-", stem.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")[0]
        ).lower()
        folder = str(Path(str(each.locate_file(""))).resolve())
        if folders.setdefault(name, folder) == folder:
            groups.setdefault(name, {}).setdefault(stem, each)  # a folder may stand on the path twice
    return [_newest_first(list(twins.values())) for twins in groups.values()]


def _newest_first(twins: list[Distribution]) -> list[Distribution]:
    # Of one there is nothing to compare; reading every version takes longer than all the rest of it.
    return twins if len(twins) == 1 else sorted(twins, key=_age, reverse=True)


def _age(found: Distribution) -> tuple[Version, str]:
    try:
        return Version(found.version), str(getattr(found, "_path", ""))
    except (InvalidVersion, TypeError):
        return Version("0"), str(getattr(found, "_path", ""))


def _settle(found: list[Entry], twins: list[Distribution]) -> list[Entry]:
    """One entry a role and name, if they agree or only one of them leads anywhere; else all that do, for a refusal."""
    if not found:
        return []
    name = found[0].distribution
    versions = " and ".join(dict.fromkeys(str(each.version) for each in twins))
    note = f"{name} is recorded {len(twins)} times ({versions}): pip install --force-reinstall {name}"
    named: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        named.setdefault((entry.role, entry.name), []).append(replace(entry, note=note))
    settled: list[Entry] = []
    for same in named.values():
        targets = list({entry.target: entry for entry in reversed(same)}.values())[::-1]  # the newest of each
        settled += targets if len(targets) == 1 else [e for e in targets if locate(e.target)] or targets[:1]
    return settled
