"""Step by step, by hand: what an engine does is a function of what it was asked, so every step can be asserted.

The executor ``sim`` has no model: its tokens depend on the prompt alone, and nothing waits for a clock.
"""

from __future__ import annotations

from engine import LLM, SamplingParams

TWO = SamplingParams(max_tokens=2)


def main() -> list[str]:
    """Two requests on an engine that computes at most eight tokens a step; returns what was seen."""
    seen: list[str] = []
    with LLM(executor="sim", max_batch_tokens=8, page_size=4, num_pages=16, audit=True) as llm:
        long, short = llm.stream([1] * 12, TWO), llm.stream([2] * 3, TWO)

        llm.step()  # eight of the long prompt's twelve tokens fill the step
        assert (long.poll(), short.poll()) == (None, None)
        seen.append(f"the short one waits: {llm.core.why(short.request_id)}")

        llm.step()  # the other four, and the whole short prompt: both have their first token
        first = [stream.poll() for stream in (long, short)]
        assert all(chunk is not None and chunk.output_tokens == 1 for chunk in first)
        seen.append(f"pages in use: {llm.core.stats()['pages_pinned']}")

        assert not llm.step()  # the second tokens end both, and nothing is left to do
        assert long.done
        assert short.done
        seen.append(f"ended: {[str(stream.poll().finish_reason) for stream in (long, short)]}")
        seen.append(f"pages in use: {llm.core.stats()['pages_pinned']}")
    return seen


if __name__ == "__main__":
    print(*main(), sep="\n")
