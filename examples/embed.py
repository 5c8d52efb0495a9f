"""Embed the engine in a program: a batch, a stream, and a step by hand.

python examples/embed.py
"""

from __future__ import annotations

from engine import LLM, SamplingParams


def main() -> None:
    """Generate with the default model in this process."""
    greedy = SamplingParams(temperature=0, max_tokens=16)
    with LLM(scheduler="radix", kvcache="paged") as llm:
        for completion in llm.generate(["The capital of France is", "One, two, three,"], greedy):
            print(repr(completion.text), completion.finish_reason, completion.cached_tokens)
        for chunk in llm.stream("Once upon a time", greedy):
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
