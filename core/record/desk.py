"""What can be asked of an engine core about its decisions: the record, switched on and off, written, and told."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, EngineError, UnknownRequest
from engine.core.record.lines import FORMAT, Log
from engine.core.record.live import overview, state_of
from engine.core.record.notes import Scribe, labels_of
from engine.core.record.pages import Veil, group_of
from engine.core.record.recorder import Recorder, Sink
from engine.core.record.remembered import remembered
from engine.core.record.ring import Ring
from engine.core.record.story import tell
from engine.core.record.told import Told
from engine.core.record.writing import Files, write_kept
from engine.core.values import hidden

if TYPE_CHECKING:
    from engine.core.loop import EngineCore
    from engine.core.protocols import Plugin

log = logging.getLogger(__name__)

OFF = "decisions are not recorded: start the engine with --record true, or switch it on (engine record on)"
MB = 1 << 20
MOST_JOBS = 4  # that may be unanswered at once


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """How decisions are recorded.

    Attributes:
        on: from the engine's start.
        ring_mb: memory for the newest of them.
        folder: where they are written as they come; empty: nowhere.
        file_mb: size of a file after which the next begins.
        files: files that are kept.
    """

    on: bool = False
    ring_mb: int = 16
    folder: str = ""
    file_mb: int = 64
    files: int = 16

    @classmethod
    def of(cls, config: EngineConfig) -> RecordOptions:
        """Those of a configuration."""
        return cls(
            config.record or config.record_dir is not None, config.record_mb, config.record_dir or "",
            config.record_file_mb, config.record_files,
        )  # fmt: skip


class RecordDesk:
    """The record of one core, as it is asked from outside. The engine's thread only, between steps.

    Attributes:
        recorder: who writes down; ``None`` while nothing is recorded.
        tell: whom the core tells: the recorder, or nobody.
    """

    def __init__(self, core: EngineCore, options: RecordOptions | None = None) -> None:
        self._core = core
        self._options = options or RecordOptions()
        self.recorder: Recorder | None = None
        self.tell = Told()
        self._header: Log | None = None
        self._veil: Veil | None = None
        self._ring: Ring | None = None
        self._files: Files | None = None
        self._ended: list[Files] = []
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)

    def open(self) -> None:
        """The plugins have started. Begins to record if that was chosen. Raises ``ConfigError``. Mutates."""
        if self._options.on:
            self.on()

    def on(self, *, folder: str | Path | None = None) -> dict[str, Any]:
        """Record from now on; a record that is on goes on. Mutates.

        Args:
            folder: where it is written as it comes, instead of the configured place.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        if self.recorder is None:
            core, options = self._core, self._options
            self._veil = Veil(secrets.token_bytes(32), group_of(core.limits.page_size))
            self._header = header = header_of(core, self._veil.group)
            self._ring = Ring(options.ring_mb * MB)
            place = options.folder if folder is None else folder
            self._files = self._opened(Path(place), header, self._veil) if place else None
            sinks: list[Sink] = [self._ring, *([self._files] if self._files is not None else [])]
            self.recorder = self.tell = Recorder(core, Scribe(self._veil, labels_of(core)), sinks)
        return self.status()

    def off(self) -> dict[str, Any]:
        """Record no more, and forget what is in memory; files stay. Mutates. Idempotent."""
        recorder, self.recorder, self.tell = self.recorder, None, Told()
        if recorder is not None:
            recorder.settle()
            if self._files is not None:
                for end in recorder.open_ends():
                    self._files.put(end)
                self._files.end()
                self._ended.append(self._files)
        self._ring = self._files = None
        return self.status()

    def close(self) -> None:
        """The core ends: waits for what is being written. Mutates. Idempotent."""
        self.off()
        while self._ended:
            self._ended.pop().close()

    # ---- what is asked

    def ask(self, what: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """By name, the answer as plain values: for other processes. ``write`` and ``explain`` answer with a ``job``;
        ``done`` tells of one."""
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "status": self.status,
            "on": self.on,
            "off": self.off,
            "write": self.begin_write,
            "explain": self.begin_explain,
            "requests": self.requests,
            "done": self.done,
        }
        if what not in known:
            raise EngineError(f"{what!r} cannot be asked of a record: {', '.join(known)} can")
        return known[what](**options)

    def status(self) -> dict[str, Any]:
        """Whether decisions are recorded, how much of them, and where. Does not mutate."""
        ring, files, header = self._ring, self._files, self._header
        if self.recorder is None or ring is None or header is None:
            return {"on": False}
        return {
            "on": True,
            "id": header.id,
            "whole": header.whole and not ring.dropped,
            "lines": len(ring),
            "dropped_lines": ring.dropped,
            "bytes": ring.size,
            "most_bytes": ring.most,
            "file": None if files is None else str(files.path),
            "file_error": None if files is None else files.error,
        }

    def write(self, path: str | Path) -> dict[str, Any]:
        """Write what is in memory as one log; waits until it is done. Raises ``EngineError``."""
        return self._wait(self.begin_write(path))

    def begin_write(self, path: str | Path) -> dict[str, Any]:
        """The same in a thread; ``done`` tells how it ended. Raises ``ConfigError`` where nothing is recorded."""
        if self.recorder is None or self._ring is None or self._header is None or self._veil is None:
            raise ConfigError(OFF)
        self.recorder.settle()
        header, veil, kept, ends = self._header, self._veil, self._ring.kept(), self.recorder.open_ends()
        return self._begin(lambda: {"path": str(path), "bytes": write_kept(Path(path), header, kept, ends, veil)})

    def explain(self, request: str) -> dict[str, Any]:
        """The story of a request by its id; waits until it is found. Raises ``UnknownRequest``."""
        return self._wait(self.begin_explain(request))

    def begin_explain(self, request: str) -> dict[str, Any]:
        """The same in a thread; ``done`` tells it: ``live`` (as it stands, if it lives), ``story`` (as far as it is
        remembered), ``recorded``. Raises ``UnknownRequest`` where nothing is known of it."""
        core, recorder = self._core, self.recorder
        alive = core.requests.get(request)
        live = None if alive is None else state_of(core, alive)
        if recorder is None or self._ring is None or self._header is None:
            if live is None:
                raise UnknownRequest(f"request {request!r} does not live; {OFF}")
            return self._begin(lambda: {"id": request, "live": live, "recorded": False, "story": None})
        recorder.settle()
        kept, ends, header = self._ring.kept(), recorder.open_ends(), self._header

        def work() -> dict[str, Any]:
            part = remembered(kept, ends, request, header.config, header.group)
            if part is None and live is None:
                raise UnknownRequest(f"request {request!r} does not live, and is not among those that are remembered")
            return {"id": request, "live": live, "recorded": True, "story": None if part is None else tell(part)}

        return self._begin(work)

    def requests(self, most: int = 1000) -> dict[str, Any]:
        """Live requests: those that run, the queue in order with reasons, the parked; at most so many."""
        return overview(self._core, most)

    def done(self, job: int) -> dict[str, Any]:
        """``{"done": False}``, or what came of a job, told once. Raises ``EngineError``: it failed, or is not known."""
        known = self._jobs.get(job)
        if known is None:
            raise EngineError(f"there is no job {job}")
        if known.thread.is_alive():
            return {"done": False}
        del self._jobs[job]
        if known.error is not None:
            raise known.error
        return {"done": True, **known.answer}

    # ---- inside

    def _begin(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for number in [number for number, job in self._jobs.items() if not job.thread.is_alive()][:-MOST_JOBS]:
            del self._jobs[number]  # nobody came for them
        if sum(job.thread.is_alive() for job in self._jobs.values()) >= MOST_JOBS:
            raise EngineError(f"{MOST_JOBS} questions about decisions are being answered: ask again later")
        number = next(self._numbers)
        self._jobs[number] = Job(work)
        return {"job": number}

    def _wait(self, begun: Mapping[str, Any]) -> dict[str, Any]:
        self._jobs[begun["job"]].thread.join()
        answer = self.done(begun["job"])
        del answer["done"]
        return answer

    def _opened(self, folder: Path, header: Log, veil: Veil) -> Files:
        options = self._options
        try:
            return Files(folder, header, veil, most=options.file_mb * MB, keep=options.files)
        except OSError as error:
            raise ConfigError(f"decisions cannot be recorded in {folder}: {error.strerror or error}") from error


class Job:
    """Work for a thread of its own, and what came of it."""

    def __init__(self, work: Callable[[], dict[str, Any]]) -> None:
        self._work = work
        self.answer: dict[str, Any] = {}
        self.error: EngineError | None = None
        self.thread = threading.Thread(target=self._run, name="record", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._work()
        except EngineError as error:
            self.error = error
        except OSError as error:
            self.error = EngineError(f"{error.filename or 'the log'}: {error.strerror or error}")
        except Exception as error:
            log.exception("a question about decisions could not be answered")
            self.error = EngineError(f"{type(error).__name__}: {error}")


def header_of(core: EngineCore, group: int) -> Log:
    """The first line of a log that begins now."""
    whole = not core.counters.steps and not core.requests
    inexact = ""
    if core.connectors:
        inexact = "connectors moved KV, and what they brought is not recorded"
    limits, model = asdict(core.limits), core.model
    return Log(
        format=FORMAT, id=time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3), began=time.time(), time=core.now(),
        whole=whole, inexact=inexact, group=group, version=version("sixhooks"),
        config={
            "limits": limits,
            "model": {"name": model.name, "fingerprint": model.fingerprint, "details": dict(model.details)},
            "overlap": core.flight.overlap,
            "scheduler": _chosen(core.scheduler),
            "kvcache": _chosen(core.kv),
            "executor": _chosen(core.executor),
            "policies": [_chosen(policy) for policy in core.policies],
            "connectors": [_chosen(connector) for connector in core.connectors],
        },
    )  # fmt: skip


def _chosen(plugin: Plugin) -> dict[str, Any]:
    """A plugin by name, with its options; secrets are hidden."""
    options = plugin.options.model_dump(mode="json")
    return {"name": plugin.name, "options": {name: hidden(name, value) for name, value in options.items()}}
