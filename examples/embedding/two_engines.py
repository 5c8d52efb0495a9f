"""Two engines in one process, with other plugins and limits, step by step in turns. They share nothing."""

from __future__ import annotations

from engine import LLM, SamplingParams

PROMPTS = ["The capital of France is", "One, two, three,", "The capital of France is"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def main() -> dict[str, list[str]]:
    """The same prompts to both: the same text, decided in another way."""
    one = LLM(scheduler="unified", kvcache="paged", num_pages=64)
    other = LLM(
        scheduler={"name": "radix", "chunked_prefill_size": 16}, kvcache="radix", policies=["shortest-predicted"],
        page_size=1, num_pages=256, executor={"name": "torch", "threads": 1}, overlap=True,
    )  # fmt: skip
    engines = {"unified + paged": one, "radix + radix": other}
    with one, other:
        open_streams = {name: [llm.stream(prompt, GREEDY) for prompt in PROMPTS] for name, llm in engines.items()}
        texts = {name: [""] * len(PROMPTS) for name in engines}
        working = [True]
        while any(working):
            working = [llm.step() for llm in engines.values()]
            for name, streams in open_streams.items():
                for number, stream in enumerate(streams):
                    if (chunk := stream.poll()) is not None:
                        texts[name][number] += chunk.text
    return texts


if __name__ == "__main__":
    for name, answers in main().items():
        print(f"{name}: {answers}")
