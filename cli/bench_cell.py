"""A cell of ``engine bench --matrix`` in a process of its own: a job on standard input, news on standard output.

Each line is JSON: ``{"progress": [done, all, seconds]}``, ``{"probe": …}`` and last ``{"result": …}`` or ``{"refused":
"…"}``. Whatever else is printed goes to standard error. When standard input ends, so does this process: nobody waits.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from engine.core.errors import EngineError

EVERY = 0.2  # seconds between two reports of progress


def main() -> None:
    """Run it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    told = json.loads(sys.stdin.readline())
    sys.path[:] = told["path"]
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**news: Any) -> None:
        out.write(json.dumps(news) + "\n")

    try:
        say(result=measured(told["job"], say))
    except EngineError as error:
        say(refused=f"{type(error).__name__}: {error}")


def measured(job: dict[str, Any], say: Any) -> dict[str, Any]:
    """What a cell came to: ``measured`` or ``found``, as plain values. Raises as ``jobs.run``."""
    from engine.lab.jobs import Job, run
    from engine.lab.searching import Found

    made, last = Job.model_validate(job), [0.0]

    def progress(done: int, total: int, now: float) -> None:
        if (moment := time.monotonic()) - last[0] >= EVERY or done == total:
            last[0] = moment
            say(progress=[done, total, now])

    came = run(made, progress=progress, tell=lambda probe: say(probe=probe._asdict()))
    limits = made.limits()
    if isinstance(came, Found):
        return {"found": came.plain(limits), "words": came.words()}
    return {"measured": came.plain(limits, each=True)}


def _end_with_parent() -> None:
    """Who started this holds standard input open; when he is gone, nothing here is wanted."""
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    main()
