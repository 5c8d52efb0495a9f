"""More requests than a server was ever meant for: what grows with their number, and what ten times its load does.

    python benchmarks/flood.py tiny [--requests 200000] [--connections 16] [--json FILE] [-- SERVE FLAGS …]
    python benchmarks/flood.py overload [--seconds 600] [--times 10] [--json FILE] [-- SERVE FLAGS …]
    python benchmarks/flood.py large [--seconds 4] [--only WORDS] [--json FILE] [-- SERVE FLAGS …]
    python benchmarks/flood.py objects [--requests 20000]

``tiny`` asks for one token at a time, over connections that stay, and prints what each process's memory grows by with
a hundred thousand requests, after the first third. ``overload`` keeps ``times`` as many requests coming as may be open
at once: what has no room must be answered 429 with ``Retry-After``, the rest as ever. ``large`` sends the worst bodies
within the limit, several at once and shape after shape, and says how long health took to answer meanwhile, beside what
a bare server on the same machine took. ``objects`` serves in this process
and counts what the garbage collector knows of. Exit code 1 where the books differ, a page is in use, something grows,
or health took 100 ms and more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from _flood_large import asked, bare, looking, shapes
from soak import Samples, Server, idle, slope

SIM = ["--executor", "sim"]
ROOMS = {"--max-running": 16, "--max-waiting": 48}  # of the server that is overloaded
SLOW_MS = 100
HURRY = 0.02  # seconds after which whoever was refused asks again, whatever it was told


class Client:
    """One connection that asks again and again. ``seen`` counts statuses; ``hasty``: 429 without ``Retry-After``."""

    def __init__(self, address: tuple[str, int], body: dict[str, Any], seen: Counter[str]) -> None:
        self._address, self._seen = address, seen
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self._request = head.encode() + data

    async def __aenter__(self) -> Client:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def ask(self) -> int:
        """The status of one more answer. A connection that was idle for too long (we were stopped) is made anew."""
        self._writer.write(self._request)
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._writer.close()
            await self._connect()
            return await self.ask()
        status = int(head.split(" ", 2)[1])
        await self._reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        self._seen[str(status)] += 1
        if status == 429 and "retry-after: " not in head:
            self._seen["hasty"] += 1
        return status


async def tiny(server: Server, options: argparse.Namespace) -> tuple[Counter[str], Samples]:
    """So many requests. Returns statuses, and memory by hundred thousands of requests."""
    seen: Counter[str] = Counter()
    samples: Samples = []
    left = iter(range(options.requests))
    every = max(1, options.requests // 200)

    async def one(number: int) -> None:
        body = {"prompt": [number, 1, 2, 3], "max_tokens": 1, "temperature": 0}
        async with Client(server.address, body, seen) as client:
            for done in left:
                await client.ask()
                if done % every == 0:
                    samples.append((done / 100_000, server.memory()))

    await asyncio.gather(*map(one, range(options.connections)))
    return seen, samples


async def overload(server: Server, options: argparse.Namespace) -> tuple[Counter[str], Samples]:
    """So many seconds. Returns statuses, and memory by minutes."""
    seen: Counter[str] = Counter()
    samples: Samples = []
    began = time.monotonic()
    over = began + options.seconds

    async def one(number: int) -> None:
        body = {"prompt": [number] * 20, "max_tokens": 40, "temperature": 0}
        async with Client(server.address, body, seen) as client:
            while time.monotonic() < over:
                if await client.ask() != 200:
                    await asyncio.sleep(HURRY)

    clients = [asyncio.create_task(one(number)) for number in range(options.times * sum(ROOMS.values()))]
    while time.monotonic() < over:
        samples.append(((time.monotonic() - began) / 60, server.memory()))
        await asyncio.sleep(min(1.0, options.seconds / 20))
    await asyncio.gather(*clients)
    return seen, samples


def faults(seen: Counter[str], now: dict[str, float], wanted: set[str]) -> list[str]:
    """Where clients and metrics differ."""
    answers = {
        status: now.get(f'engine_http_requests_total{{path="/v1/completions",status="{status}"}}', 0)
        for status in ("200", "429")
    }
    ended = {name: value for name, value in now.items() if name.startswith("engine_requests_ended_total")}
    pairs = {
        "answers 200": (seen["200"], answers["200"]),
        "answers 429": (seen["429"], answers["429"]),
        "429 without Retry-After": (seen["hasty"], 0),
        "other answers": (sum(seen.values()) - seen["200"] - seen["429"] - seen["hasty"], 0),
        "accepted requests, and answers": (now["engine_requests_accepted_total"], seen["200"]),
        "accepted requests, and all ends": (now["engine_requests_accepted_total"], sum(ended.values())),
        "pages in use": (now["engine_kv_pages_pinned"], 0),
    }
    missing = [f"no answer {status}" for status in wanted if not seen[status]]
    return [*missing, *(f"{words}: {one:g} and {other:g}" for words, (one, other) in pairs.items() if one != other)]


def large(options: argparse.Namespace) -> dict[str, Any]:
    """Shape after shape. Returns a row for each: the worst answers of health, and of a bare server meanwhile."""
    server, rows = Server(options.flags), []
    try:
        with bare() as other, looking({"ours": (server.address, "/health"), "bare": (other, "/")}) as eyes:
            for name, shape in shapes().items():
                if options.only in name:
                    with eyes:
                        seen = asked(server.address, shape, options.seconds)
                    rows.append({"shape": name, "seen": dict(seen), **eyes.found()})
                    print("{shape:<28}{ours:>8.1f}{ours_p99:>8.1f}{bare:>8.1f}  {seen}".format(**rows[-1]), flush=True)
        idle(server)
    finally:
        code = server.stop()
    slow = [f"{row['shape']}: health took {row['ours']:.0f} ms" for row in rows if row["ours"] >= SLOW_MS]
    died = [f"the server ended with exit code {code}"] if code else []
    return {"worst_ms": max(row["ours"] for row in rows), "samples": rows, "faults": slow + died}


async def objects(requests: int) -> dict[str, Any]:
    """What the collector knows of, after a tenth of the requests and after all of them; all in this process."""
    from engine import AsyncEngine, EngineConfig
    from engine.plugins.frontends.openai import OpenAIFrontend

    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    app = OpenAIFrontend().app(engine)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b"",
             "http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": b"/v1/completions"}  # fmt: skip
    statuses: Counter[int] = Counter()

    async def ask() -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        gone = asyncio.Event()

        async def receive() -> Any:
            message = next(messages, None)
            if message is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses[message["status"]] += 1

        await app({**scope, "state": {}}, receive, send)

    async def many(count: int) -> Counter[str]:
        for _ in range(count // 8):
            await asyncio.gather(*(ask() for _ in range(8)))
        await ask()  # the engine still knows the requests of its last plan: as many each time
        gc.collect()
        return Counter(type(one).__qualname__ for one in gc.get_objects())

    try:
        before, after = await many(requests // 10), await many(requests)
    finally:
        engine.shutdown()
    grown = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    more = sum(after.values()) - sum(before.values())
    return {
        "requests": requests, "statuses": dict(statuses), "objects": sum(after.values()), "more_objects": more,
        "most_grown": dict(Counter(grown).most_common(8)),
        "faults": [f"{more} objects more after {requests} requests"] if more > 100 + requests / 100 else [],
    }  # fmt: skip


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=["tiny", "overload", "large", "objects"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", default="", help="shapes whose name has these words")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--max-slope", type=float, default=2.0, help="MiB a hundred thousand requests, or a minute")
    parser.add_argument("--json", type=Path)
    ours, *theirs = (list(words) for is_mark, words in groupby(sys.argv[1:], "--".__eq__) if not is_mark)
    options = parser.parse_args(ours)
    options.flags = theirs[0] if theirs else SIM  # of engine serve
    options.requests = options.requests or (20_000 if options.what == "objects" else 200_000)
    options.seconds = options.seconds or (4 if options.what == "large" else 600)
    if options.what == "objects":
        result = asyncio.run(objects(options.requests))
    else:
        result = large(options) if options.what == "large" else served(options)
    for key, value in result.items():
        if key != "samples":
            print(f"{key:<16}{value:.2f}" if isinstance(value, float) else f"{key:<16}{value}")
    if options.json is not None:
        options.json.write_text(json.dumps(result))
    return 1 if result["faults"] else 0


def served(options: argparse.Namespace) -> dict[str, Any]:
    """What came of a server in processes of its own."""
    rooms = [str(word) for pair in ROOMS.items() for word in pair] if options.what == "overload" else []
    server = Server([*rooms, *options.flags])
    began = time.monotonic()
    try:
        seen, samples = asyncio.run((tiny if options.what == "tiny" else overload)(server, options))
        seconds = time.monotonic() - began
        now = idle(server)
    finally:
        code = server.stop()
    grows = [slope(samples, process) / 60 for process in range(len(samples[0][1]))]
    found = faults(seen, now, {"200"} if options.what == "tiny" else {"200", "429"})
    found += [f"process {number} grows by {one:.2f}" for number, one in enumerate(grows) if one > options.max_slope]
    found += [f"the server ended with exit code {code}"] if code else []
    return {
        "seconds": seconds, "statuses": dict(seen), "a_second": sum(seen.values()) / seconds,
        "mib_start": [round(one, 1) for one in samples[0][1]], "mib_end": [round(one, 1) for one in samples[-1][1]],
        "mib_per_minute" if options.what == "overload" else "mib_per_100000": [round(one, 2) for one in grows],
        "samples": samples, "faults": found,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
