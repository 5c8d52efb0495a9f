"""What a process has in common with whatever runs in it, before and after an engine lived there. Run as a script.

``python world.py KIND``: prints, as JSON, everything that differs. KIND is a name of ``KINDS``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIM: dict[str, Any] = {"executor": "sim", "num_pages": 64}


def world() -> dict[str, Any]:
    """Everything global that an engine could change."""
    shared = {
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "warnings": [repr(entry) for entry in warnings.filters],
        "showwarning": repr(warnings.showwarning),
        "logging": [
            repr(logging.root), repr(logging.root.handlers), repr(logging.getLoggerClass()),
            logging.root.manager.disable, logging.raiseExceptions, repr(logging.lastResort),
        ],
        "hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook)],
        "path": list(sys.path),
        "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold()],
        "streams": [repr(sys.stdout), repr(sys.stderr), faulthandler.is_enabled()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "event loop policy": repr(asyncio.get_event_loop_policy()),
        "random": hash(random.getstate()),
        "locale": locale.setlocale(locale.LC_ALL),
        "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if alive(name)),
        "children": sorted(children()),
        "temporary files": sorted(path.name for path in Path(tempfile.gettempdir()).iterdir()),
    }  # fmt: skip
    return {**shared, **(torch_world() if "torch" in sys.modules else {})}


def alive(name: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{name}") or os.path.islink(f"/proc/self/fd/{name}")


def children() -> list[str]:
    """Process ids of all our children, zombies included."""
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def torch_world() -> dict[str, Any]:
    import numpy as np
    import torch

    return {
        "torch": [
            torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, str(torch.get_default_device()),
        ],
        "torch random": torch.get_rng_state().sum().item(),
        "numpy random": str(np.random.get_state()[1].sum()),
        "numpy errors": np.geterr(),
    }  # fmt: skip


def torch(threads: int) -> dict[str, Any]:
    """The default model, with a number of threads that is not torch's own choice."""
    return {"executor": {"name": "torch", "threads": threads}, "num_pages": 64, "overlap": True}


def scripted(config: dict[str, Any]) -> None:
    from engine import LLM, SamplingParams

    with LLM(**config) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        left = llm.stream([4, 5], SamplingParams(max_tokens=50))
        next(left)
    llm.close()


def served(config: dict[str, Any], *, in_process: bool) -> None:
    from engine import AsyncEngine, EngineConfig, SamplingParams

    async def main() -> None:
        async with await AsyncEngine.start(EngineConfig(**config), in_process=in_process) as engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
            left = asyncio.create_task(engine.complete([4, 5], SamplingParams(max_tokens=50)))
            await asyncio.sleep(0)
        await asyncio.wait([left])
        left.exception()
        await engine.close()

    asyncio.run(main())


KINDS: dict[str, Callable[[], None]] = {
    "script": lambda: scripted(SIM),
    "script, overlap": lambda: scripted({**SIM, "overlap": True}),
    "torch": lambda: scripted(torch(3)),
    "thread": lambda: served(SIM, in_process=True),
    "process": lambda: served(SIM, in_process=False),
}


def main(kind: str) -> None:
    if kind != "torch":
        import engine.core.models.tokenizer  # noqa: F401  (it imports numpy, which adds filters for warnings)
    found = changed_by(KINDS[kind])
    if kind == "torch":
        found["again"] = changed_by(lambda: scripted(torch(5)))
    json.dump(found, sys.stdout)


def changed_by(use: Callable[[], None]) -> dict[str, Any]:
    """Before and after, of all that differs."""
    before = world()
    use()
    gc.collect()
    after = world()
    return {name: [before[name], after[name]] for name in before if before[name] != after[name]}


if __name__ == "__main__":
    main(sys.argv[1])
