"""One open page: elements of NiceGUI, drawn anew by each frame where that says something new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.plugins.frontends import _dashboard_charts as charts
from engine.plugins.frontends import _dashboard_words as words
from engine.plugins.frontends._dashboard_feed import Feed
from engine.plugins.frontends._dashboard_frame import Frame
from engine.plugins.frontends._dashboard_style import CSS
from engine.plugins.frontends._dashboard_tree import tree

Draw = Callable[[Frame], Any]


class Page:
    """A page as one browser sees it. Made within a NiceGUI client; it watches while that is connected.

    Args:
        name: of the model.
        first: what is shown before the first look.
        has_tree: the KV cache keeps one.
        guarded: there is something to log out from.
    """

    def __init__(self, feed: Feed, name: str, first: Frame, *, has_tree: bool, guarded: bool) -> None:
        from nicegui import context, ui

        self._ui: Any = ui
        self._html: list[tuple[Any, Draw]] = []
        self._charts: list[tuple[Any, Draw]] = []
        ui.add_css(CSS)
        self._dark = ui.dark_mode(None)
        with ui.element("main").classes("dash"):
            self._top(name, first, guarded=guarded)
            self._body(first, has_tree)
        client = context.client
        client.on_connect(lambda: feed.join(self))
        client.on_disconnect(lambda: feed.leave(self))
        client.on_delete(lambda: feed.leave(self))

    def show(self, frame: Frame) -> None:
        """Draw a moment. What has not changed is not sent."""
        for element, draw in self._html:
            if (content := draw(frame)) != element.content:
                element.set_content(content)
        for chart, draw in self._charts:
            options = draw(frame)
            if options != chart.options:
                chart.options.update(options)
                chart.update()

    # ---- inside

    def _top(self, name: str, first: Frame, *, guarded: bool) -> None:
        ui = self._ui
        with ui.element("header").classes("top"):
            self._text(lambda _: words.brand(name), first)
            self._text(words.state, first)
            self._text(lambda frame: words.chips(frame.about), first).classes("chips")
            with ui.element("button").classes("icon").on("click", self._turn):
                ui.html("light / dark", sanitize=False)
            if guarded:
                with (
                    ui.element("form").props('method="post" action="logout"'),
                    ui.element("button").classes("icon").props('type="submit"'),
                ):
                    ui.html("log out", sanitize=False)
        self._text(words.cause, first).classes("cause")
        self._text(words.tiles, first).classes("tiles")

    def _body(self, first: Frame, has_tree: bool) -> None:
        ui = self._ui
        with ui.element("section").classes("card steps"):
            self._text(words.steps_head, first)
            self._chart(charts.steps, first, "bars")
            self._text(words.kinds, first)
            self._chart(charts.lanes, first, "lanes")
        self._text(words.queue, first).classes("card queue")
        with ui.element("section").classes("card third"):
            self._text(words.pages_head, first)
            self._chart(charts.pages, first, "map")
        if has_tree:
            with ui.element("section").classes("card third"):
                self._text(words.tree_head, first)
                self._chart(tree, first, "map")
        with ui.element("section").classes("card third"):
            ui.html("<h2>Pace <small>tokens a second, and the part of prompts that was cached</small></h2>",
                    sanitize=False)  # fmt: skip
            self._chart(charts.pace, first, "map")
        self._text(words.hooks, first).classes("card third" if not has_tree else "card")

    def _text(self, draw: Draw, first: Frame) -> Any:
        element = self._ui.html(draw(first), sanitize=True)
        self._html.append((element, draw))
        return element

    def _chart(self, draw: Draw, first: Frame, size: str) -> None:
        with self._ui.element("div").classes(size):
            self._charts.append((self._ui.echart(draw(first)).classes("chart"), draw))

    def _turn(self) -> None:
        self._dark.value = not self._dark.value
