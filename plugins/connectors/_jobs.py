"""The threads of a store: transfers in slices, the urgent before the others, each ended once and in time.

A job touches KV memory only in ``with job.touching()``. So the engine's thread can end one at once, whatever its worker
hangs in: what comes back later finds the job over and touches nothing. Between two slices whoever is more urgent goes
first; loads before look-ups before saves before what is done for later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.core.plan import Transfer, TransferEvent

log = logging.getLogger(__name__)

GOODBYE = 5.0  # seconds that a slice under way has before its thread is given up
URGENCY = ("pull", "probe", "push", "task")
COMPUTING = 0.002  # seconds since the engine's thread was last here after which it must be computing
SHARE = 0.06  # of one processor that a worker takes while the engine computes: that is what a step may get longer by
LOOK = 0.005  # seconds between two looks whether the engine still does
WAIT = {"probe": 0.5, "pull": 1.0, "push": 1.0}  # of patience: how long a look-up may take; a slice of the others


class Over(Exception):
    """The job was ended meanwhile."""


class Job:
    """A transfer under way, or a task of the store's own that says whether there is more to do.

    Attributes:
        at: pages that are done.
        asked, since: when it came, and when its slice under way began (0: none is).
        until: when it ends as it is, whatever is missing; ``None``: when it is done.
        cancelled: nobody waits for it any more.
        hung: it was ended, or is a task that takes too long, while a worker is at it.
        wrong: what went wrong with some of it, though not so that it must end; empty: nothing.
    """

    def __init__(self, wish: Transfer | None, *, until: float | None = None, task: Callable[[], bool] | None = None):
        self.wish, self.task, self.until = wish, task, until
        self.kind = wish.kind if wish is not None else "task"
        self.at = 0
        self.asked = time.monotonic()
        self.since = 0.0
        self.over = self.cancelled = self.hung = False
        self.wrong = ""
        self._lock = threading.Lock()

    @contextmanager
    def touching(self) -> Iterator[None]:
        """For as long as pages are read or written. Raises ``Over``."""
        with self._lock:
            if self.over:
                raise Over
            yield

    def end(self, *, wait: bool = False) -> bool:
        """End it, if no page is being touched this moment (or once none is). True if it was not over before."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            fresh, self.over = not self.over, True
            return fresh
        finally:
            self._lock.release()


class Workers:
    """Threads that work on jobs, a slice at a time.

    Args:
        name: of the threads.
        count: how many.
        slice_of: does the next slice of a transfer: the event that ends it, or ``None`` if there is more to do.
        patience: seconds; a look-up that takes more than half of them has found nothing, a slice that takes more than
            all of them has failed.
    """

    def __init__(self, name: str, count: int, slice_of: Callable[[Job], TransferEvent | None], patience: float) -> None:
        self._slice_of, self._patience = slice_of, patience
        self._queues: dict[str, deque[Job]] = {kind: deque() for kind in URGENCY}
        self._open: dict[str, Job] = {}  # transfers by id
        self._tasks: set[Job] = set()  # those that a worker is at
        self._events: deque[TransferEvent] = deque()
        self._wake = threading.Condition()
        self._hanging = 0  # workers in a slice of a job that is over
        self.closing = False
        self._closed = threading.Event()
        self._seen = time.monotonic()
        self._threads = [threading.Thread(target=self._serve, name=f"engine-{name}", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    # ---- on the engine's thread

    def give(self, job: Job) -> None:
        """Have it done."""
        if job.wish is not None:
            self._open[job.wish.id] = job
        with self._wake:
            self._queues[job.kind].append(job)
            self._wake.notify()

    def later(self, task: Callable[[], bool]) -> None:
        """Call it when nothing else is to be done, again for as long as it answers True. From any thread."""
        self.give(Job(None, task=task))

    def cancel(self, name: str) -> None:
        """Nobody waits for this transfer any more. One that has ended is none of ours."""
        job = self._open.get(name)
        if job is not None:
            job.cancelled = True

    def take_events(self) -> list[TransferEvent]:
        """What ended since the last call, and what ends now since its time is up."""
        self._seen = time.monotonic()
        found = [self._events.popleft() for _ in range(len(self._events))]
        for event in found:
            self._open.pop(event.transfer_id, None)
        if self._tasks:
            self._doubt_tasks()
        for name, job in list(self._open.items()):
            overdue = self._overdue(job)
            if overdue is not None and self._give_up(job):
                del self._open[name]
                found.append(overdue)
        return found

    def _overdue(self, job: Job) -> TransferEvent | None:
        wish, now = job.wish, self._seen
        assert wish is not None
        rest = wish.pages[job.at :]
        if job.cancelled:
            return TransferEvent(wish.id, "failed", failed_pages=rest, reason="cancelled")
        if job.until is not None and now >= job.until:
            return TransferEvent(wish.id, "done", failed_pages=rest)
        spent = now - (job.asked if job.kind == "probe" else job.since or now)
        allowed = WAIT[job.kind] * self._patience
        hopeless = not job.since and self._hanging >= len(self._threads)
        if spent <= allowed and not hopeless:
            return None
        if job.kind == "probe":
            return TransferEvent(wish.id, "found")
        why = "the store hangs" if hopeless else f"no answer for {spent:.1f} s"
        return TransferEvent(wish.id, "failed", failed_pages=rest, reason=why)

    def _doubt_tasks(self) -> None:
        """A task that takes too long hangs: what waits for its worker is not to wait for ever."""
        with self._wake:
            for job in self._tasks:
                if not job.hung and self._seen - job.since > self._patience:
                    job.hung = True
                    self._hanging += 1

    def _give_up(self, job: Job) -> bool:
        with self._wake:
            if not job.end():
                return False
            if job in self._queues[job.kind]:
                self._queues[job.kind].remove(job)
            elif job.since:
                job.hung = True
                self._hanging += 1
            return True

    def close(self) -> None:
        """Stop the threads; what was not done yet never is. One that hangs is left behind after a while."""
        with self._wake:
            self.closing = True
            self._closed.set()
            self._wake.notify_all()
        until = time.monotonic() + GOODBYE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for job in self._open.values():  # of one left behind: KV memory may be somebody else's when it goes on
            job.end()

    # ---- on the workers'

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            began = time.thread_time()
            event: TransferEvent | None = None
            more = False
            try:
                if job.task is not None:
                    more = job.task()
                else:
                    event = self._slice_of(job)
                    more = event is None
            except Over:
                pass
            except Exception as error:
                log.exception("a store's thread")
                if job.wish is not None:
                    reason = f"{type(error).__name__}: {error}"
                    event = TransferEvent(job.wish.id, "failed", failed_pages=job.wish.pages[job.at :], reason=reason)
            self._back(job, event, more)
            self._breathe(time.thread_time() - began)

    def _next(self) -> Job | None:
        with self._wake:
            while not self.closing:
                for queue in self._queues.values():
                    if queue:
                        job = queue.popleft()
                        job.since = time.monotonic()
                        if job.task is not None:
                            self._tasks.add(job)
                        return job
                self._wake.wait()
        return None

    def _back(self, job: Job, event: TransferEvent | None, more: bool) -> None:
        """A slice is done: the job ends, or goes on when it is its turn; or it was ended meanwhile."""
        with self._wake:
            job.since = 0.0
            self._tasks.discard(job)
            self._hanging -= job.hung
            job.hung = False
            if event is not None and job.end(wait=True):
                self._events.append(event)
            elif more and not job.over:
                self._queues[job.kind].appendleft(job)

    def _breathe(self, spent: float) -> None:
        """Leave the processor to the engine after so many seconds of it, for as long as the engine computes."""
        until = time.monotonic() + spent * (1 - SHARE) / SHARE
        while (now := time.monotonic()) < until and now - self._seen > COMPUTING and not self.closing:
            self._closed.wait(min(LOOK, until - now))
