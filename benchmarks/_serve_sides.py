"""The engines that ``serve.py`` compares, each in a process of its own: ``python _serve_sides.py NAME OPTIONS``.

Reads lines ``{"workload": …, "seed": …, "scale": …}`` and answers each with a line of figures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import _serve_http
from _serve_work import Asked, Record, workload


class Serves(Protocol):
    """An engine, ready. Raises ``ValueError`` for a workload that it cannot serve."""

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Figures of one run."""


class Ours:
    """This engine, in process. Options are flags of ``engine serve``, as ``key=value``."""

    def __init__(self, options: Sequence[str], threads: int) -> None:
        from engine.core.assemble import assemble
        from engine.core.config import load_config

        flags = pairs(options)
        if "executor" not in flags:  # another than the default has options of its own
            flags.setdefault("executor.threads", str(threads))
        self.core = assemble(load_config(flags=flags).config)
        self.about = self.core.describe()["model"]

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Requests are added as their time comes; tokens count when a step's deltas are there."""
        from engine.core.request import SamplingParams

        core, record, clock = self.core, Record(asked), time.perf_counter
        waiting = list(range(len(asked)))
        places: dict[str, int] = {}
        started = clock()
        while waiting or core.has_work:
            lead = len(record.said.get(0, ()))
            while waiting and asked[waiting[0]].after <= lead:
                at = waiting.pop(0)
                params = SamplingParams(temperature=0, max_tokens=asked[at].output, ignore_eos=True)
                places[core.add(asked[at].prompt, params).id] = at
                record.came[at] = clock()
            deltas, now = core.step(), clock()
            for delta in deltas:
                at = places[delta.request_id]
                record.tokens.setdefault(at, []).extend([now] * len(delta.tokens))
                record.said.setdefault(at, []).extend(delta.tokens)
        return {**record.result(started, clock()), "said": [record.said[at] for at in range(len(asked))]}


class Transformers:
    """transformers' own model, in so many threads."""

    def __init__(self, options: Sequence[str], threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.model = plain_model()


class Generate(Transformers):
    """transformers' ``generate``: one static batch, prompts padded on the left."""

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """All requests at once."""
        import torch

        at_once(asked)
        record, longest = Record(asked), max(len(one.prompt) for one in asked)
        ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in asked])
        mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked])
        started = time.perf_counter()

        def note(known: Any, scores: Any) -> Any:  # called before a token is chosen: once more than there are gaps
            for at in range(len(asked)):
                record.tokens.setdefault(at, []).append(time.perf_counter())
            return scores

        record.came = dict.fromkeys(range(len(asked)), started)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=asked[0].output, eos_token_id=None,
                min_new_tokens=asked[0].output, pad_token_id=0, logits_processor=[note],
            )  # fmt: skip
        return {**record.result(started, time.perf_counter()), "said": out[:, longest:].tolist()}


class Continuous(Transformers):
    """transformers' continuous batching: a manager that takes requests while others run."""

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """Requests are added as their time comes. Only the one whose tokens others wait for is told token by token."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        record, total = Record(asked), sum(len(one.prompt) + one.output for one in asked)
        # Left to itself it takes most of the machine's memory for its pages.
        pages = ContinuousBatchingConfig(
            page_size=32, num_blocks=total // 32 + 2 * len(asked) + 8, max_batch_tokens=2048
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        waiting, lead = list(range(len(asked))), 0
        with self.model.continuous_batching_context_manager(greedy, True, 5, pages) as manager:
            started = time.perf_counter()
            while len(record.said) < len(asked):
                while waiting and asked[waiting[0]].after <= lead:
                    at = waiting.pop(0)
                    record.came[at] = time.perf_counter()
                    manager.add_request(
                        asked[at].prompt, str(at), asked[at].output, streaming=at == 0 and bool(waiting),
                        record_timestamps=True, eos_token_id=-1,
                    )  # fmt: skip
                told = manager.get_result(timeout=60)
                if told is None or told.error:
                    raise SystemExit(f"transformers: {told.error if told else 'no answer for a minute'}")
                if told.request_id == "0":
                    lead = len(told.generated_tokens)
                if told.is_finished():
                    at = int(told.request_id)
                    record.said[at], record.tokens[at] = told.generated_tokens, told.timestamps
            ended = time.perf_counter()
        return {**record.result(started, ended), "said": [record.said[at] for at in range(len(asked))]}


class VLLM:
    """vLLM, offline, float32, eager. Option: ``model``, a directory."""

    def __init__(self, options: Sequence[str], threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        model = pairs(options)["model"]
        self.llm = LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=4096)

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """All requests at once; when tokens came is not known."""
        at_once(asked)
        params = [self.params(temperature=0, max_tokens=one.output, ignore_eos=True, detokenize=False) for one in asked]
        started = time.perf_counter()
        out = self.llm.generate([{"prompt_token_ids": one.prompt} for one in asked], params, use_tqdm=False)
        ended = time.perf_counter()
        return {**Record(asked).result(started, ended), "said": [list(one.outputs[0].token_ids) for one in out]}


SIDES: dict[str, Callable[[Sequence[str], int], Serves]] = {
    "ours": Ours,
    "ours-server": lambda options, threads: _serve_http.ours(pairs(options), threads),
    "generate": Generate,
    "continuous": Continuous,
    "vllm": VLLM,
    "vllm-server": lambda options, threads: _serve_http.vllm(pairs(options), threads),
    "llama-server": lambda options, threads: _serve_http.llama(pairs(options), threads),
}


def pairs(options: Sequence[str]) -> dict[str, str]:
    """``key=value`` each."""
    return dict(option.split("=", 1) for option in options)


def at_once(asked: Sequence[Asked]) -> None:
    """Raise ``ValueError`` where requests arrive later, or want different numbers of tokens."""
    if any(one.after for one in asked) or len({one.output for one in asked}) > 1:
        raise ValueError("takes all requests at once, of one length")


def plain_model() -> Any:
    """The default model as plain transformers, on the weights that our engine reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.core.models import gguf_llama
    from engine.core.models.gguf_file import GGUFFile
    from engine.core.models.source import resolve

    with GGUFFile(resolve("default").path) as file:
        values = {key: value for key, value in gguf_llama.hf_config(file).items() if key != "model_type"}
        model = LlamaForCausalLM._from_config(LlamaConfig(**values), attn_implementation="sdpa")
        model.load_state_dict({name: torch.from_numpy(array) for name, array in gguf_llama.weights(file)}, strict=False)
    model.tie_weights()
    return model.eval()


def export(folder: str) -> None:
    """Write the default model, in float32, as a directory of Hugging Face's layout, for peers that read one."""
    from transformers import PreTrainedTokenizerFast

    from engine.core.models.gguf_file import GGUFFile
    from engine.core.models.gguf_tokenizer import build_tokenizer
    from engine.core.models.source import resolve

    plain_model().save_pretrained(folder)
    with GGUFFile(resolve("default").path) as file:
        PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(file.metadata)).save_pretrained(folder)


def main() -> None:
    """Serve what is asked on standard input, until it ends."""
    name, threads, *options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries and their processes print, and lines of figures are not to be mixed with it
    side = SIDES[name](options, int(threads))
    print(json.dumps({"ready": name, "about": getattr(side, "about", {})}), file=answers, flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        try:
            figures = side.serve(workload(wish["workload"], wish["seed"], wish["scale"]))
        except ValueError as error:
            figures = {"cannot": str(error)}
        print(json.dumps(figures), file=answers, flush=True)
    if isinstance(side, _serve_http.Server):
        side.close()


if __name__ == "__main__":
    main()
