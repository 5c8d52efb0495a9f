"""What a tier saves: time to the first token of a long prompt, computed, and loaded from each kind of store.

    python benchmarks/tiers.py [--tokens 2000] [--rounds 3] [--only host,file]

One engine a tier, with the default model. Each round computes the prompt cold (under a namespace that nobody has
seen), then forgets the pool's cache and asks again, so that its KV comes from the tier; printed are medians over rounds
and the median of the ratios within rounds. Both include the step that computes the prompt's last tokens.

*busy* is the time of a decode step of four requests, without and with a load of the same prompt under way, in turns:
what transfers cost those that run beside them. The ratio is that of turns that follow each other, so that what else the
machine does weighs on both.

``redis`` starts a server of its own on a unix socket, ``mooncake-store`` a master; where these or their libraries are
missing, the row is left out, and said. ``multi`` is memory over files.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.core import EngineConfig, EngineCore, Request, SamplingParams, assemble

GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
FOREVER = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


def first_token(core: EngineCore, tokens: list[int], salt: str) -> tuple[float, Request]:
    """Seconds to the first token of a request alone, and the request."""
    start = time.perf_counter()
    request = core.add(tokens, GREEDY, salt=salt)
    while not request.finished:
        core.step()
    seconds = time.perf_counter() - start
    while core.has_work:  # what it computed is being saved
        core.step()
    core.take_deltas()
    return seconds, request


def compare(core: EngineCore, tokens: list[int], rounds: int) -> Iterator[tuple[float, float, int]]:
    """(computed, loaded) in seconds, and the tokens that were loaded, of each round."""
    for number in range(rounds):
        cold, _ = first_token(core, tokens, f"round {number}")
        core.kv.reset()
        warm, request = first_token(core, tokens, f"round {number}")
        core.kv.reset()
        yield cold, warm, request.cached_tokens


def busy(core: EngineCore, tokens: list[int], rounds: int, steps: int = 12) -> tuple[float, float, float]:
    """(without, with a load under way, median of the ratios within rounds): median ms of a decode step of four."""
    for number in range(4):
        core.add([number + 1] * 64, FOREVER, read_cache=False)
    while any(request.debt != 1 for request in core.running) or len(core.running) < 4:
        core.step()
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for loading in (False, True):
            times[loading].append(statistics.median(turn(core, tokens, steps, loading=loading)))
    for request_id in list(core.requests):
        core.abort(request_id)
    core.take_deltas()
    ratio = statistics.median(beside / alone for alone, beside in zip(times[False], times[True], strict=True))
    return statistics.median(times[False]), statistics.median(times[True]), ratio


def turn(core: EngineCore, tokens: list[int], steps: int, *, loading: bool) -> Iterator[float]:
    """ms of each of so many decode steps; those in which nothing was loaded do not count where ``loading``."""
    request = None
    while steps:
        if loading and request is None:
            core.kv.reset()
            request = core.add(tokens, GREEDY, salt="round 0", parked_on=["nothing"])
            core.step()  # the look-up
        start = time.perf_counter()
        core.step()
        spent = (time.perf_counter() - start) * 1e3
        if core.exchange or not loading:
            steps -= 1
            yield spent
        elif request is not None:
            core.abort(request.id)
            request = None
    if request is not None:
        core.abort(request.id)
    while core.exchange:
        core.step()


def redis_tier(stack: ExitStack, root: Path) -> dict[str, Any]:
    """A server of our own. Raises ``RuntimeError`` where it cannot be had."""
    if shutil.which("redis-server") is None or find_spec("redis") is None:
        raise RuntimeError("redis-server or the library redis is not installed")
    path = root / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(root)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    while not path.exists():
        if server.poll() is not None:
            raise RuntimeError(f"redis-server ended with {server.returncode}")
        time.sleep(0.01)
    return {"name": "redis", "url": f"unix://{path}"}


def mooncake_tier(stack: ExitStack, root: Path) -> dict[str, Any]:
    """A master of our own. Raises ``RuntimeError`` where it cannot be had."""
    try:
        import mooncake.store
    except ImportError as error:
        raise RuntimeError(f"Mooncake is not installed: {error}") from error
    ports = []
    for _ in range(2):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    command = [str(binary), f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}", "--rpc_address=127.0.0.1"]
    with (root / "master.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    time.sleep(1.0)
    return {"name": "mooncake-store", "master": f"127.0.0.1:{ports[0]}", "segment": "1GiB", "buffer": "64MiB"}


def file_tier(stack: ExitStack, root: Path) -> dict[str, Any]:
    """A folder of our own."""
    return {"name": "file", "root": str(root / "tier")}


TIERS: dict[str, Callable[[ExitStack, Path], list[dict[str, Any]]]] = {
    "host": lambda stack, root: [{"name": "host"}],
    "file": lambda stack, root: [file_tier(stack, root)],
    "redis": lambda stack, root: [redis_tier(stack, root)],
    "mooncake-store": lambda stack, root: [mooncake_tier(stack, root)],
    "multi": lambda stack, root: [{"name": "multi"}, {"name": "host"}, file_tier(stack, root)],
}


def measure(name: str, tiers: list[dict[str, Any]], tokens: list[int], rounds: int) -> str:
    """A row of the table."""
    core = assemble(EngineConfig(connectors=tiers, kv_memory="512MiB"))
    first_token(core, tokens[:64], "warm-up")
    rows = list(compare(core, tokens, rounds))
    cold, warm = (statistics.median(row[which] for row in rows) for which in (0, 1))
    ratio = statistics.median(row[0] / row[1] for row in rows)
    alone, beside, share = busy(core, tokens, 3 * rounds)
    core.close()
    return f"{name:<16}{cold:>9.2f}{warm:>9.2f}{ratio:>9.1f}{rows[-1][2]:>9}{alone:>9.1f}{beside:>9.1f}{share:>9.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="host,file,redis,mooncake-store,multi")
    arguments = parser.parse_args()
    tokens = [number * 7919 % 40_000 + 10 for number in range(arguments.tokens)]
    print(f"a prompt of {arguments.tokens} tokens, seconds to the first token; decode steps of four in ms (medians)")
    heads = ("computed", "loaded", "ratio", "tokens", "alone", "beside", "ratio")
    print(f"{'tier':<16}" + "".join(f"{head:>9}" for head in heads))
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            root = Path(folder)
            try:
                tiers = TIERS[name](stack, root)
            except RuntimeError as error:
                print(f"{name:<16}left out: {error}")
                continue
            print(measure(name, tiers, tokens, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
