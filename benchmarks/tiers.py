"""What a tier saves: time to the first token of a long prompt, computed, and loaded from the host or the file tier.

    python benchmarks/tiers.py [--tokens 2000] [--rounds 3]

One engine a tier, with the default model. Each round computes the prompt cold (under a namespace that nobody has
seen), then forgets the pool's cache and asks again, so that its KV comes from the tier; printed are medians over rounds
and the median of the ratios within rounds. Both include the step that computes the prompt's last tokens.

*busy* is the time of a decode step of four requests, without and with a load of the same prompt under way, in turns:
what transfers cost those that run beside them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
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


def busy(core: EngineCore, tokens: list[int], rounds: int, steps: int = 12) -> tuple[float, float]:
    """(without, with a load under way): median ms of a decode step of four."""
    for number in range(4):
        core.add([number + 1] * 64, FOREVER, read_cache=False)
    while any(request.debt != 1 for request in core.running) or len(core.running) < 4:
        core.step()
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for loading in (False, True):
            request = None
            for _ in range(steps):
                if loading and request is None:
                    request = core.add(tokens, GREEDY, salt="round 0", parked_on=["nothing"])
                start = time.perf_counter()
                core.step()
                times[loading].append((time.perf_counter() - start) * 1e3)
                if request is not None and not core.exchange:
                    core.abort(request.id)
                    core.kv.reset()
                    request = None
            if request is not None:
                core.abort(request.id)
            while core.exchange:
                core.step()
    for request_id in list(core.requests):
        core.abort(request_id)
    core.take_deltas()
    return statistics.median(times[False]), statistics.median(times[True])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tokens = [number * 7919 % 40_000 + 10 for number in range(arguments.tokens)]
    print(f"a prompt of {arguments.tokens} tokens, seconds to the first token; decode steps of four in ms (medians)")
    print(
        f"{'tier':<8}{'computed':>10}{'loaded':>10}{'ratio':>8}{'tokens':>8}{'busy without':>14}{'with':>8}{'ratio':>8}"
    )
    with tempfile.TemporaryDirectory() as root:
        tiers: list[dict[str, Any]] = [{"name": "host"}, {"name": "file", "root": root}]
        for tier in tiers:
            core = assemble(EngineConfig(connectors=[tier], kv_memory="512MiB"))
            first_token(core, tokens[:64], "warm-up")
            rows = list(compare(core, tokens, arguments.rounds))
            cold, warm = (statistics.median(row[which] for row in rows) for which in (0, 1))
            ratio = statistics.median(row[0] / row[1] for row in rows)
            alone, beside = busy(core, tokens, arguments.rounds)
            core.close()
            print(
                f"{tier['name']:<8}{cold:>10.2f}{warm:>10.2f}{ratio:>8.1f}{rows[-1][2]:>8}"
                f"{alone:>14.1f}{beside:>8.1f}{beside / alone:>8.2f}"
            )


if __name__ == "__main__":
    main()
