"""Threads that wait for peers, so that the engine need not; a peer that hangs takes a few of them and not all."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

GOODBYE = 5.0  # seconds that a thread has to end


class Job(Protocol):
    """Something to do with a peer. ``run`` raises nothing."""

    address: str

    def run(self) -> None: ...


class Workers:
    """At most ``most`` threads, started as they are needed; at most ``each`` of them at work for one address.

    Args:
        name: of whom they work for, in the threads' names.
    """

    def __init__(self, name: str, most: int, each: int) -> None:
        self._name, self._most, self._each = name, most, each
        self._jobs: deque[Job] = deque()
        self._busy: Counter[str] = Counter()
        self._wake = threading.Condition()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    def add(self, job: Job) -> None:
        """Have it done; after ``close`` nothing is. Mutates."""
        with self._wake:
            if self._closing:
                return
            self._jobs.append(job)
            if len(self._jobs) > self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name=f"engine-{self._name}-pull", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._wake.notify()

    def withdraw(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Jobs of this kind that nobody has begun: they will not be done. Mutates."""
        with self._wake:
            out = [job for job in self._jobs if wanted(job)]
            for job in out:
                self._jobs.remove(job)
            return out

    def close(self) -> None:
        """End the threads; what was not begun never is. Whoever blocks must be freed before."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(GOODBYE)

    def _next(self) -> Job | None:
        for job in self._jobs:
            if self._busy[job.address] < self._each:
                self._jobs.remove(job)
                self._busy[job.address] += 1
                return job
        return None

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._closing and (job := self._next()) is None:
                    self._idle += 1
                    self._wake.wait()
                    self._idle -= 1
                if self._closing:
                    return
            assert job is not None
            try:
                job.run()
            finally:
                with self._wake:
                    self._busy[job.address] -= 1
                    if not self._busy[job.address]:
                        del self._busy[job.address]
                    self._wake.notify()
