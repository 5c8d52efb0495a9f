"""Seeded random workloads for vLLM's scheduler and ours: a configuration, and requests with all that they emit.

Every workload can end: each request fits into the pool and the model's length, and no setting contradicts another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Draw = random.Random
Config = dict[str, Any]


def generate(seed: int, *, asynchronous: bool) -> dict[str, Any]:
    """The workload of this seed; the same in every process and Python."""
    draw = Draw(f"vllm-{'async' if asynchronous else 'sync'}-{seed}")
    config = _config(draw, asynchronous)
    requests = _Requests(draw, config).make()
    _size_pool(draw, config, requests)
    workload = {
        "name": f"random_{'async' if asynchronous else 'sync'}_{seed}",
        "about": f"Seeded random mix (seed {seed}).",
        "source": f"vLLM 0.27.1 {'AsyncScheduler' if asynchronous else 'Scheduler'}, default config unless given",
        "config": config,
        "requests": requests,
    }
    if actions := _actions(draw, config, requests):
        workload["actions"] = actions
    return workload


def pages_needed(config: Mapping[str, Any], request: Mapping[str, Any]) -> int:
    """Pages that the request holds at its longest, drafts and lookahead included."""
    extra = config["num_spec_tokens"] + config["num_lookahead_tokens"]
    tokens = min(len(request["prompt"]) + request["max_tokens"] + extra, config["max_model_len"])
    return -(-tokens // config["block_size"])


def _chance(draw: Draw, probability: float) -> bool:
    return draw.random() < probability


def _config(draw: Draw, asynchronous: bool) -> Config:
    methods = [None, None, None, "draft_model", "eagle", "eagle" if asynchronous else "ngram"]
    method = draw.choice(methods)
    drafts = draw.randint(1, 4) if method else 0
    slots = draw.choice([1, 2, 3, 4, 6, 8, 16])
    length = draw.choice([40, 64, 100, 160, 256])
    chunked = _chance(draw, 0.85)
    budget = draw.choice([drafts + 1, 8, 14, 24, 32, 48, 64, 128]) if chunked else length + draw.randint(0, 40)
    budget = max(budget, slots, drafts + 1)
    threshold = draw.choice([0, 0, 0, drafts + 1, 8, 16, 24, 40])
    return {
        "policy": draw.choice(["fcfs", "fcfs", "priority"]),
        "max_num_batched_tokens": budget + (slots if method == "draft_model" else 0),
        "max_num_scheduled_tokens": budget,
        "max_num_seqs": slots,
        "max_model_len": length,
        "block_size": draw.choice([1, 2, 3, 4, 8, 16, 16]),
        "num_blocks": 0,
        "usable_blocks": 0,
        "enable_prefix_caching": _chance(draw, 0.9),
        "long_prefill_token_threshold": max(threshold, drafts + 1) if threshold else 0,
        "chunked_prefill": chunked,
        "num_spec_tokens": drafts,
        "spec_method": method,
        "num_lookahead_tokens": drafts if method in ("draft_model", "eagle") else 0,
        "eagle_drop_last_block": method == "eagle",
        "async": asynchronous,
        "reserve_full_isl": _chance(draw, 0.6),
        "watermark": draw.choice([0.0, 0.0, 0.0, 0.01, 0.1, 0.125, 0.3]),
    }


def _size_pool(draw: Draw, config: Config, requests: Sequence[Mapping[str, Any]]) -> None:
    """From just enough for the largest request to room for several at once."""
    needs = sorted((pages_needed(config, request) for request in requests), reverse=True)
    crowd = sum(needs[: config["max_num_seqs"]])
    room = draw.choice([0.0, 0.1, 0.25, 0.5, 1.2])
    config["usable_blocks"] = needs[0] + int(room * max(0, crowd - needs[0])) + draw.randint(0, 3)
    config["num_blocks"] = config["usable_blocks"] + 1


def _actions(draw: Draw, config: Config, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if config["async"] or not _chance(draw, 0.08):
        return []
    last = max(request["arrival_step"] for request in requests) + 20
    return [
        {"step": draw.randint(1, last), "op": "reset_prefix_cache", "reset_running": _chance(draw, 0.5)}
        for _ in range(draw.randint(1, 3))
    ]


class _Requests:
    """Draws requests that share prefixes, repeat each other and go on where others ended."""

    def __init__(self, draw: Draw, config: Config) -> None:
        self._draw = draw
        self._config = config
        self._vocab = draw.choice([2, 4, 900, 900])
        self._eager = _chance(draw, 0.5)  # arrives all at once or spread out
        self._plain = _chance(draw, 0.3)  # no salts, stops, aborts
        self._ties = _chance(draw, 0.4)
        length = config["max_model_len"]
        self._families = [self._tokens(draw.randint(1, max(1, length // 2))) for _ in range(draw.randint(1, 3))]
        self._made: list[dict[str, Any]] = []

    def make(self) -> list[dict[str, Any]]:
        step = 0
        for number in range(self._draw.choice([3, 5, 8, 12, 20, 30])):
            self._made.append(self._one(number, step))
            if not _chance(self._draw, 0.7 if self._eager else 0.3):
                step += self._draw.choice([1, 1, 2, 3, 5, 25])
        return self._made

    def _one(self, number: int, step: int) -> dict[str, Any]:
        draw = self._draw
        prompt = self._prompt()
        output = self._output(prompt)
        request: dict[str, Any] = {
            "id": f"r{number}",
            "arrival_step": step,
            "arrival_time": draw.randint(0, 2) if self._ties else number,
            "max_tokens": len(output),
            "priority": draw.randint(0, 2) if self._config["policy"] == "priority" else 0,
            "cache_salt": None,
            "stop_token_ids": [],
            "abort_step": None,
            "prompt": prompt,
            "output": output,
        }
        if not self._plain:
            self._season(request)
        if self._config["num_spec_tokens"]:
            request["drafts"] = self._drafts(output)
        return request

    def _season(self, request: dict[str, Any]) -> None:
        draw, output = self._draw, request["output"]
        if _chance(draw, 0.15):
            request["cache_salt"] = draw.choice(["", "a", "b"])
        if _chance(draw, 0.06):
            request["lora_name"] = draw.choice(["x", "y"])
        if _chance(draw, 0.1):
            request["skip_reading_prefix_cache"] = True
        if _chance(draw, 0.25):
            request["stop_token_ids"] = sorted({draw.choice(output), draw.randint(1, 900)})
        if _chance(draw, 0.15):
            request["min_tokens"] = draw.randint(1, len(output))
        if _chance(draw, 0.2):
            request["abort_step"] = request["arrival_step"] + draw.choice([0, 0, 1, 2, 3, 5, 9, 20, 40])
            if _chance(draw, 0.5):
                request["abort_phase"] = "mid"

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randint(1, self._vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        draw, longest = self._draw, self._config["max_model_len"] - 1
        kind = draw.random()
        if self._made and kind < 0.15:  # a repeat
            prompt = list(draw.choice(self._made)["prompt"])
        elif self._made and kind < 0.35:  # the next turn
            earlier = draw.choice(self._made)
            prompt = [*earlier["prompt"], *earlier["output"], *self._tokens(draw.randint(0, 12))]
        elif kind < 0.8:  # a shared prefix, all of it or some
            family = draw.choice(self._families)
            prompt = [*family[: draw.choice([len(family), draw.randint(1, len(family))])]]
            prompt += self._tokens(draw.choice([0, 1, draw.randint(0, 40)]))
        else:
            prompt = self._tokens(draw.randint(1, longest))
        return prompt[:longest]

    def _output(self, prompt: Sequence[int]) -> list[int]:
        """Of equal prompts now and then the same; some are cut by the model's length exactly at its end."""
        room = self._config["max_model_len"] - len(prompt)
        count = min(room, self._draw.choice([1, 2, self._draw.randint(1, 20), self._draw.randint(1, 80), room]))
        twin = next((r["output"] for r in self._made if r["prompt"] == prompt), None)
        if twin is not None and _chance(self._draw, 0.6):
            return [*twin, *self._tokens(count)][:count]
        return self._tokens(count)

    def _drafts(self, output: Sequence[int]) -> list[list[int]]:
        """For each number of tokens emitted what a drafter proposes next: right up to some point."""
        draw, most = self._draw, self._config["num_spec_tokens"]
        skill = draw.choice([0.3, 0.7, 0.95])
        drafts: list[list[int]] = [[]]
        for at in range(1, len(output) + 1):
            full = self._config["spec_method"] != "ngram" or _chance(draw, 0.6)
            coming = [*output[at : at + most], *[7] * most][: most if full else draw.randint(0, most)]
            drafts.append([token if _chance(draw, skill) else token + 1 for token in coming])
        return drafts
