"""The code of a new connector. ``@WORD@`` is filled in."""

from __future__ import annotations

CONNECTOR = '''
"""@NAME@: a connector. It keeps KV pages elsewhere and brings them back, without blocking a step."""

from concurrent.futures import ThreadPoolExecutor

from pydantic import Field

from engine.core import Connector, PluginOptions, TransferEvent, hookimpl


class @CLASS@(Connector):
    """Keeps pages in this process, by their keys; the oldest goes first. Put a disk or a network here."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"
    loads = True
    saves = True

    class Options(PluginOptions):
        pages: int = Field(1024, ge=1, description="pages that are kept")

    def __init__(self, options=None):
        super().__init__(options)
        self._kept = {}  # key -> bytes of a page; the worker's alone
        self._open = {}  # transfer id -> work
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="@NAME@")  # no thread runs before the first work

    def start(self, context):
        """Called once, before the first step."""
        self._page_size = context.limits.page_size

    def register(self, layout):
        """Where KV memory lies: ``layout`` reads and writes the bytes of a page."""
        self._layout = layout

    def close(self):
        """What is not begun is not done. No thread is left."""
        self._worker.shutdown(cancel_futures=True)

    @hookimpl
    def transfer_kv(self, transfers):
        """Begin what is new, tell what has ended since the last call. Nobody waits here: it is the engine's loop."""
        for wish in transfers:
            if wish.kind != "cancel":  # needs no answer: what it is of ends by itself
                self._open[wish.id] = self._worker.submit(self._move, wish)
        ended = [name for name, work in self._open.items() if work.done()]
        return [self._event(name, self._open.pop(name)) for name in ended]

    def _event(self, name, work):
        """The work's own event; whatever it raised is a failed transfer, with the reason in words."""
        error = work.exception()
        return work.result() if error is None else TransferEvent(name, "failed", reason=str(error))

    def _move(self, wish):
        """In the worker's thread: do what is wished, and say what came of it."""
        if wish.kind == "probe":
            pages = next((at for at, key in enumerate(wish.keys) if key not in self._kept), len(wish.keys))
            return TransferEvent(wish.id, "found", tokens=pages * self._page_size)
        for at, (key, page) in enumerate(zip(wish.keys, wish.pages, strict=True)):
            if wish.kind == "push":
                self._save(key, page)
            elif key in self._kept:
                self._layout.write(page, self._kept[key])
            else:
                return TransferEvent(wish.id, "failed", failed_pages=wish.pages[at:], reason="it is not kept any more")
        return TransferEvent(wish.id, "done")

    def _save(self, key, page):
        if key not in self._kept:
            self._kept[key] = self._layout.read(page)
        if len(self._kept) > self.options.pages:
            del self._kept[next(iter(self._kept))]
'''
