"""From an engine's lens to pictures: true to what was seen, bounded, harmless; looked once for all who watch."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig, SamplingParams
from engine.core.histograms import Histogram
from engine.core.lens.steps import LANES, STEPS, Kind
from engine.plugins.frontends import _dashboard_charts as charts
from engine.plugins.frontends import _dashboard_words as words
from engine.plugins.frontends._dashboard_feed import Feed
from engine.plugins.frontends._dashboard_frame import Frame, History
from engine.plugins.frontends._dashboard_tree import placed, tree
from engine.testing import make_core

LIFE = {"status": "ok", "state": "ready", "ready": True, "cause": None}
TEXTS = (words.state, words.cause, words.tiles, words.steps_head, words.kinds, words.queue, words.pages_head,
         words.tree_head, words.hooks)  # fmt: skip
PICTURES = (charts.steps, charts.lanes, charts.pages, charts.pace, tree)
EVIL = "<script>alert(1)</script>"


def histories(core: Any) -> History:
    """A history of a core's looks, with the client's books empty."""
    times = SimpleNamespace(first=Histogram.of((1.0,)), gap=Histogram.of((1.0,)))
    engine: Any = SimpleNamespace(description=core.describe(), ledger=SimpleNamespace(times=times))
    return History(engine)


@pytest.mark.parametrize(
    ("scheduler", "kvcache", "overlap"), list(product(("unified", "radix"), ("paged", "radix"), (False, True)))
)
def test_pictures_show_what_was_seen(scheduler: str, kvcache: str, overlap: bool) -> None:
    core = make_core(scheduler=scheduler, kvcache=kvcache, overlap=overlap, num_pages=60, page_size=8,
                     max_batch_tokens=96, max_running=30)  # fmt: skip
    for n in range(60):
        core.add([n % 3] * 40 + [n] * 5, SamplingParams(max_tokens=30), metadata={"tenant": EVIL})
    history = histories(core)
    frame = history.frame(LIFE, None)
    for draw in (*TEXTS, *PICTURES):
        draw(frame)
    said = ""
    for number in range(STEPS + 30):
        if number % 10 == 0:
            frame = history.frame(LIFE, core.lens.look(since=history.step))
            said += "".join(draw(frame) for draw in TEXTS)
        core.step()
        core.lens.stepped(0.001)
    frame = history.frame(LIFE, core.lens.look(since=history.step))
    assert len(frame.steps) == STEPS
    shown = charts.steps(frame)["series"]
    assert [sum(column) for column in zip(*(one["data"] for one in shown[:3]), strict=True)] == [
        one.decode + one.prefill + one.again for one in frame.steps
    ]
    cells = [cell for one in charts.lanes(frame)["series"] for cell in one["data"]]
    assert len(cells) == sum(len(one.cells) for one in frame.steps)
    assert {cell[3] for cell in cells} <= {name for name, *_ in frame.names.values()}
    assert max(cell[1] for cell in cells) < LANES
    pages = charts.pages(frame)["series"][0]["data"]
    assert [one[3] for one in pages] == list(range(60))
    assert (len(tree(frame)["series"][1]["data"]) > 0) == (kvcache == "radix")
    assert all(len(json.dumps(draw(frame))) < 250_000 for draw in PICTURES)
    assert EVIL not in said
    assert words.escape(EVIL) in said


def test_colours_are_told_for_each_kind_and_each_reason() -> None:
    from engine.core import Why

    assert set(charts.KINDS) == set(Kind)
    assert set(words.WHY_COLOURS) >= set(map(str, Why)) - {"adapters", "delay", "nothing_owed"}


def test_a_tree_is_laid_out_along_its_tokens() -> None:
    nodes = [(-1, 8, 1, 0, 2, 9), (-1, 4, 1, 0, 0, 8), (0, 2, 1, 1, 0, 7), (0, 6, 1, 0, 0, 6)]
    assert placed(nodes) == [(0, 8, 0.5, 1.25), (0, 4, 2.0, 1.25), (8, 10, 0.0, 0.5), (8, 14, 1.0, 0.5)]
    assert placed([]) == []


def test_numbers_are_told_in_few_letters() -> None:
    assert [words.short(value) for value in (0, 3, 3.25, 999, 9999, 12345, 250e3, 4.2e6)] == [
        "0", "3", "3.2", "999", "9999", "12.3k", "250k", "4.2M"
    ]  # fmt: skip


def test_the_engine_is_looked_at_once_for_all_and_no_more_when_all_have_left() -> None:
    class Viewer:
        def __init__(self) -> None:
            self.frames: list[Frame] = []

        def show(self, frame: Frame) -> None:
            self.frames.append(frame)

    class Broken(Viewer):
        def show(self, frame: Frame) -> None:
            raise RuntimeError("no screen")

    async def several(viewer: Viewer, count: int) -> None:
        async with asyncio.timeout(60):
            while len(viewer.frames) < count:
                await asyncio.sleep(0.005)

    async def main() -> None:
        config = EngineConfig.model_validate({"executor": "sim"})
        async with await AsyncEngine.start(config, in_process=True) as engine:
            feed = Feed(engine, lambda: LIFE, every=0.01)
            first, second, broken = Viewer(), Viewer(), Broken()
            feed.join(first)
            await several(first, 2)
            feed.join(second)
            feed.join(second)
            feed.join(broken)
            assert second.frames == first.frames[-1:]
            await several(second, 5)
            assert feed.viewers == [first, second]  # who cannot be drawn is shown no more
            assert feed.looks == len(first.frames)
            assert second.frames[-3:] == first.frames[-3:]
            assert (await engine.ask_lens("about"))["open"]
            feed.leave(first)
            await several(second, 8)
            feed.leave(second)
            feed.leave(second)
            async with asyncio.timeout(60):
                while feed.watching:
                    await asyncio.sleep(0.005)
            assert not (await engine.ask_lens("about"))["open"]
            feed.join(first)
            await several(first, len(first.frames) + 2)
            await feed.close()
            await feed.close()
            assert not feed.watching

    asyncio.run(main())
