"""What a step published before it was computed: whose it is, who started on it, and how to take it back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.request import Request


class Journal:
    """Early publications of one step. They are taken back where a grant is revoked, a row or the whole step fails."""

    __slots__ = ("_adopters", "_keys", "_owner_of")

    def __init__(self) -> None:
        self._keys: dict[Request, list[object]] = {}
        self._owner_of: dict[int, Request] = {}  # page -> for whom it is computed
        self._adopters: dict[Request, list[Request]] = {}

    def enter(self, owner: Request, keys: Iterable[object], pages: Sequence[int]) -> None:
        """Pages of the owner's that the step computes were published under these keys. Mutates."""
        self._keys.setdefault(owner, []).extend(keys)
        self._owner_of.update(dict.fromkeys(pages, owner))

    def adopt(self, request: Request, pages: Sequence[int]) -> None:
        """The request starts on these pages, some of which the step may compute. Mutates."""
        if not self._owner_of:
            return
        for page in self._owner_of.keys() & pages:
            adopters = self._adopters.setdefault(self._owner_of[page], [])
            if request not in adopters:
                adopters.append(request)

    def is_adopted(self, owner: Request) -> bool:
        """Whether somebody started on what is computed for the owner."""
        return owner in self._adopters

    def dependents(self, owners: Sequence[Request]) -> list[Request]:
        """Requests that started, directly or through others, on what is computed for these."""
        found: list[Request] = []
        pending = list(owners)
        while pending:
            for adopter in self._adopters.get(pending.pop(), ()):
                if adopter not in found:
                    found.append(adopter)
                    pending.append(adopter)
        return found

    def take_back(self, owner: Request) -> list[object]:
        """The owner's part is not computed: returns the keys to un-publish. Mutates."""
        keys = self._keys.pop(owner, [])
        if keys:
            self._owner_of = {page: other for page, other in self._owner_of.items() if other is not owner}
        return keys

    def take_back_all(self) -> list[object]:
        """Nothing of it is computed: returns all keys. Mutates."""
        keys = [key for keys in self._keys.values() for key in keys]
        self._keys.clear()
        self._owner_of.clear()
        return keys
