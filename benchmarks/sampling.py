"""What sampling costs a step, feature by feature: ``python benchmarks/sampling.py [--vocab 49152] [--repeat 9]``.

Every row of the batch uses the feature. Times are processor time of one thread, so that a busy machine does not matter
much, and medians of interleaved repetitions; "beside greedy" is what the step costs when one row of the batch uses the
feature and the others are greedy. No model is loaded.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from engine.core.request import Request
from engine.core.sampling import SamplingParams
from engine.plugins.executors._sampling import Draw, sample
from engine.plugins.executors._sampling_edits import Editor

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, flat": {"top_p": 0.9, "temperature": 2.0},
    "min_p 0.05": {"min_p": 0.05},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias, 100 tokens": {"temperature": 0, "logit_bias": {100 * n: 1.0 for n in range(100)}},
    "min_tokens": {"temperature": 0, "min_tokens": 1000},
    "logprobs 0": {"temperature": 0, "logprobs": 0},
    "logprobs 20": {"temperature": 0, "logprobs": 20},
    "all of it": {
        "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 5,
    },
}  # fmt: skip
PROMPT, OUTPUT = 512, 256  # tokens of each request so far


class Bench:
    """Batches of requests in the middle of their output, on logits as peaked as a language model's."""

    def __init__(self, rows: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        ranks = torch.rand(rows, vocab, generator=generator).argsort(-1).float()
        self.logits = -1.7 * (ranks + 1).log() + 0.3 * torch.randn(rows, vocab, generator=generator)
        self.tokens = torch.randint(0, vocab, (rows, PROMPT + OUTPUT), generator=generator).tolist()
        self.editor = Editor()

    def requests(self, wishes: list[dict[str, Any]]) -> list[Request]:
        """One for each row."""
        return [
            Request(
                id=str(row), tokens=list(self.tokens[row]), num_prompt=PROMPT, params=SamplingParams(seed=row, **wish),
                max_total=9999, stop_ids=frozenset({2}),
            )
            for row, wish in enumerate(wishes)
        ]  # fmt: skip

    def step(self, requests: list[Request]) -> float:
        """Milliseconds to choose a token for every row, with all that leads to it but the logits."""
        logits = self.logits.clone()
        start = time.thread_time()
        draws = []
        for row, request in enumerate(requests):
            at = len(request.tokens)
            params = request.params
            plain = not (params.min_tokens or params.penalised or params.logit_bias)
            edits = () if plain else (self.editor.edits(request, at, at, ()),)
            draws.append(Draw(params, row, at, *edits))
        sample(logits, draws)
        return 1e3 * (time.thread_time() - start)


def main() -> None:
    """Print one table for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeat", type=int, default=9)
    given = parser.parse_args()
    print(f"vocabulary {given.vocab}, {PROMPT} + {OUTPUT} tokens so far, one thread")
    torch.set_num_threads(1)
    for rows in given.rows:
        bench = Bench(rows, given.vocab)
        batches: dict[str, tuple[list[Request], list[Request]]] = {}
        for name, wish in FEATURES.items():
            alone = [wish] + [FEATURES["greedy"]] * (rows - 1)
            batches[name] = bench.requests([wish] * rows), bench.requests(alone)
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in FEATURES}
        with torch.inference_mode():
            for turn in range(given.repeat + 2):
                for name, pair in batches.items():
                    for kept, requests in zip(times[name], pair, strict=True):
                        spent = bench.step(requests)
                        if turn >= 2:  # counts are built and memory is warm
                            kept.append(spent)
        print(f"\n{rows} rows              all rows    us a row    one beside greedy")
        for name, (everybody, one) in times.items():
            middle = statistics.median(everybody)
            print(f"{name:24} {middle:8.2f} ms {1e3 * middle / rows:8.1f} {statistics.median(one):12.2f} ms")


if __name__ == "__main__":
    main()
