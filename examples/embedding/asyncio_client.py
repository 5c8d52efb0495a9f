"""An asyncio program: many at once, and four ways to leave early, all of which free what the request held."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from engine import AsyncEngine, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)
ENDLESS = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


async def many(engine: AsyncEngine) -> list[str]:
    """One batch in the engine, whoever asks."""
    prompts = ["The capital of France is", "The capital of Italy is", "One, two, three,"]
    return [answer.text for answer in await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts))]


async def timeout(engine: AsyncEngine) -> str:
    """A deadline of one's own."""
    try:
        async with asyncio.timeout(0.5):
            return (await engine.complete("Once upon a time", ENDLESS)).text
    except TimeoutError:
        return "too slow"


async def cancelled(engine: AsyncEngine) -> bool:
    """A task that nobody wants any more."""
    task = asyncio.create_task(engine.complete("Once upon a time", ENDLESS))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def first_sentence(engine: AsyncEngine) -> str:
    """Read until there is enough. ``aclosing`` ends the request here and now, not when Python collects the iterator."""
    text = ""
    async with aclosing(engine.generate("Once upon a time", ENDLESS)) as chunks:
        async for chunk in chunks:
            text += chunk.text
            if "." in text:
                break
    return text


async def by_name(engine: AsyncEngine) -> str | None:
    """From elsewhere, by the name that the request was given."""
    running = asyncio.create_task(engine.complete("Once upon a time", ENDLESS, request_id="story"))
    while not engine.abort("story"):
        await asyncio.sleep(0.01)
    return (await running).finish_reason


async def main(config: EngineConfig | None = None) -> dict[str, object]:
    """Each in turn; what is left in the engine at the end is nothing."""
    async with await AsyncEngine.start(config, in_process=True) as engine:
        results: dict[str, object] = {}
        for way in (many, timeout, cancelled, first_sentence, by_name):
            results[way.__name__] = await way(engine)
        while (stats := await engine.stats())["running"]:
            await asyncio.sleep(0.01)
        return {**results, "pages in use": stats["pages_pinned"], "aborted": engine.ledger.ended["abort"]}


if __name__ == "__main__":
    for name, result in asyncio.run(main()).items():
        print(f"{name}: {result!r}")
