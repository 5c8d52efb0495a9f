"""The engines that ``serve.py`` compares, each in a process of its own: ``python _serve_sides.py NAME OPTIONS``.

Reads lines ``{"workload": …, "seed": …, "scale": …}`` and answers each with a line of figures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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

        flags = dict(option.split("=", 1) for option in options)
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
    """transformers' continuous batching: ``generate_batch``."""

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """All requests at once; when tokens came is not known."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        at_once(asked)
        total = sum(len(one.prompt) + one.output for one in asked)
        config = GenerationConfig(
            max_new_tokens=asked[0].output, do_sample=False, eos_token_id=-1, pad_token_id=0
        )  # fmt: skip
        # Left to itself it takes most of the machine's memory for its pages.
        pages = ContinuousBatchingConfig(
            page_size=32, num_blocks=total // 32 + 2 * len(asked) + 8, max_batch_tokens=2048
        )
        started = time.perf_counter()
        out = self.model.generate_batch(
            [one.prompt for one in asked], generation_config=config, continuous_batching_config=pages
        )
        ended = time.perf_counter()
        said = [out[name].generated_tokens for name in sorted(out, key=lambda name: int(name.rsplit("_", 1)[-1]))]
        return {**Record(asked).result(started, ended), "said": said}


class VLLM:
    """vLLM, offline, float32, eager."""

    def __init__(self, options: Sequence[str], threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        import tempfile

        from vllm import LLM, SamplingParams

        self.folder = tempfile.TemporaryDirectory()
        plain_model().save_pretrained(self.folder.name)
        self.params = SamplingParams
        self.llm = LLM(
            self.folder.name, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=4096
        )

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """All requests at once; when tokens came is not known."""
        at_once(asked)
        params = [self.params(temperature=0, max_tokens=one.output, ignore_eos=True, detokenize=False) for one in asked]
        started = time.perf_counter()
        out = self.llm.generate([{"prompt_token_ids": one.prompt} for one in asked], params, use_tqdm=False)
        ended = time.perf_counter()
        return {**Record(asked).result(started, ended), "said": [list(one.outputs[0].token_ids) for one in out]}


class LlamaCpp:
    """llama.cpp through llama-cpp-python: one stream at a time, so W3 alone. Option: ``model=FILE.gguf``."""

    def __init__(self, options: Sequence[str], threads: int) -> None:
        from llama_cpp import Llama

        from engine.core.models.source import resolve

        file = dict(option.split("=", 1) for option in options).get("model", str(resolve("default").path))
        self.llm = Llama(file, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """The one request."""
        if len(asked) > 1:
            raise ValueError("serves one stream at a time")
        record = Record(asked)
        self.llm.reset()
        started = time.perf_counter()
        record.came[0] = started
        said, times = record.said.setdefault(0, []), record.tokens.setdefault(0, [])
        for token in self.llm.generate(asked[0].prompt, temp=0.0, top_k=1):
            said.append(int(token))
            times.append(time.perf_counter())
            if len(said) == asked[0].output:
                break
        return {**record.result(started, time.perf_counter()), "said": [said]}


SIDES: dict[str, tuple[Callable[[Sequence[str], int], Serves], str | None]] = {
    "ours": (Ours, None),
    "generate": (Generate, "transformers"),
    "continuous": (Continuous, "transformers"),
    "vllm": (VLLM, "vllm"),
    "llama.cpp": (LlamaCpp, "llama_cpp"),
}
"""Name -> class, and the module that must be installed for it."""


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


def installed(name: str) -> bool:
    """Whether what a side needs can be imported."""
    module = SIDES[name][1]
    return module is None or importlib.util.find_spec(module) is not None


def main() -> None:
    """Serve what is asked on standard input, until it ends."""
    name, threads, *options = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print, and lines of figures are not to be mixed with it
    side = SIDES[name][0](options, int(threads))
    print(json.dumps({"ready": name, "about": getattr(side, "about", {})}), file=answers, flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        try:
            figures = side.serve(workload(wish["workload"], wish["seed"], wish["scale"]))
        except ValueError as error:
            figures = {"cannot": str(error)}
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    main()
