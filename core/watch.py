"""Audit mode looks after every ask of a policy whether it changed a request that it was shown, and changes it back.

A policy that sorts ``request.tokens`` in place would make the model say something else: no check of its *answer* finds
that. Comparing every live request costs time in proportion to their tokens, hence only in audit mode and in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from engine.core.request import Request

SCRATCH = ("kv_state", "sched_state")  # written by role plugins, also while a policy asks what is cached
FIELDS = tuple(field.name for field in fields(Request) if field.name not in SCRATCH)
LISTS = ("tokens", "pages")


class RequestWatch:
    """Remembers requests before an ask and compares them after it.

    Args:
        live: all live requests by id.
    """

    def __init__(self, live: Callable[[], Mapping[str, Request]]) -> None:
        self._live = live

    def before(self, hook: str, args: tuple[Any, ...]) -> Callable[[], str | None]:
        """Remember what may be changed; the answer compares, changes back, and says what was changed.

        ``admit`` is asked once a candidate: there only the candidate is remembered.
        """
        shown: Iterable[Request] = [args[1]] if hook == "admit" else list(self._live().values())
        saved = [(request, [getattr(request, name) for name in FIELDS], _copies(request)) for request in shown]
        return lambda: _restore(saved)


def _copies(request: Request) -> tuple[list[int], list[int], set[str]]:
    return list(request.tokens), list(request.pages), set(request.parked_on)


def _restore(saved: list[tuple[Request, list[Any], tuple[list[int], list[int], set[str]]]]) -> str | None:
    changed = None
    for request, values, (tokens, pages, parked_on) in saved:
        for name, value in zip(FIELDS, values, strict=True):
            if getattr(request, name) is not value and getattr(request, name) != value:
                setattr(request, name, value)
                changed = changed or (request.id, name)
        for name, content in (("tokens", tokens), ("pages", pages)):
            if getattr(request, name) != content:
                list.__setitem__(getattr(request, name), slice(None), content)
                changed = changed or (request.id, name)
        if request.parked_on != parked_on:
            request.parked_on.clear()
            request.parked_on.update(parked_on)
            changed = changed or (request.id, "parked_on")
    return None if changed is None else f"changed {changed[1]} of request {changed[0]}: requests are to read"
