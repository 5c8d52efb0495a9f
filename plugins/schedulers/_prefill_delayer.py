"""Holding prefill back for a few decode steps, so that more of it shares one batch.

Where running requests end one at a time, prefill-first admits them one at a time too, and each tiny prefill batch
stalls all decodes. Source: SGLang's prefill delayer, as one engine alone decides (there it also waits for siblings).
"""

from __future__ import annotations


class PrefillDelayer:
    """Decides before each prefill batch whether it may start.

    Args:
        max_passes: most steps that prefill is held back in a row; 0: never.
        queue_ratio: wait until the queue holds this share of the number that decode (``None``: do not look at it).
        low_usage: below this share of the pool in use, memory idles and prefill starts at once (``None``: never).
    """

    def __init__(self, max_passes: int, queue_ratio: float | None = None, low_usage: float | None = None) -> None:
        self._max_passes = max_passes
        self._queue_ratio = queue_ratio
        self._low_usage = low_usage
        self._held = 0  # steps in a row
        self._largest = 0  # requests in the largest prefill batch so far

    def started(self, requests: int) -> None:
        """A prefill batch of so many requests was planned. Mutates."""
        self._largest = max(self._largest, requests)

    def holds(self, *, decoding: int, slots: int, waiting: int, usage: float) -> bool:
        """Whether prefill is held back in this step. Asked once a step. Mutates.

        Args:
            decoding: requests that could decode instead; with none nothing is ever held back.
            slots: how many more requests may run.
            waiting: requests in the queue.
            usage: share of the pool in use.
        """
        wanted = decoding and waiting and (self._few_slots(slots, waiting) or self._short_queue(decoding, waiting))
        idle = self._low_usage is not None and usage < self._low_usage
        if not wanted or idle or self._held >= self._max_passes:
            self._held = 0
            return False
        self._held += 1
        return True

    def _few_slots(self, slots: int, waiting: int) -> bool:
        """Fewer may start than the largest batch so far had, and than wait."""
        return slots < min(self._largest, waiting)

    def _short_queue(self, decoding: int, waiting: int) -> bool:
        if self._queue_ratio is None:
            return False
        return waiting < min(int(decoding * self._queue_ratio), self._largest)
