"""What the weight formats of the compiled kernels cost in exactness, on a fixed text.

    python benchmarks/formats.py [--tokens 1024] [--prompts 8] [--output 32]

The text is this project's licence, which does not change. Perplexity and agreement of the likeliest token are over
every position of it, in windows of 256 tokens; greedy agreement is of free-running outputs against float32's: the share
of tokens up to where they first part, and of outputs that never do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.core.models.source import resolve
from engine.core.models.tokenizer import load_tokenizer
from engine.core.native import kernels
from engine.core.native.kernels import Format
from engine.plugins.executors._fused import dense
from engine.plugins.executors._model import LoadedModel, load_model
from engine.plugins.executors._paged import active

WINDOW = 256
TEXT = Path(__file__).parent.parent / "LICENSE"


def logits(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """Of all positions, ``[tokens, vocab]``."""
    positions = torch.arange(len(ids))
    with torch.inference_mode(), active(dense):
        return model.run(torch.tensor(ids), positions, positions)


def continued(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, without a cache: a few hundred tokens are soon computed again."""
    ids = list(prompt)
    for _ in range(count):
        positions = torch.arange(len(ids))
        with torch.inference_mode(), active(dense):
            ids.append(int(model.run(torch.tensor(ids), positions, positions[-1:]).argmax()))
    return ids[len(prompt) :]


def common(one: list[int], other: list[int]) -> int:
    """Tokens up to where they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output", type=int, default=32)
    args = parser.parse_args()
    source = resolve("default")
    text = load_tokenizer(source).encode(TEXT.read_text())[: args.tokens]
    windows = [text[at : at + WINDOW] for at in range(0, len(text), WINDOW)]
    prompts = [text[at : at + 24] for at in range(0, len(text) - 24, max(24, len(text) // args.prompts))][
        : args.prompts
    ]
    print(f"{'weights':<10}{'perplexity':>12}{'same top':>10}{'same tokens':>13}{'same outputs':>14}")
    first: tuple[torch.Tensor, list[list[int]]] | None = None
    for format in Format:
        model = load_model(source, torch.float32)
        model.compile(kernels(), format)
        rows = [logits(model, window) for window in windows]
        loss = torch.cat([F.cross_entropy(row[:-1], torch.tensor(window[1:]), reduction="none")
                          for row, window in zip(rows, windows, strict=True)]).mean()  # fmt: skip
        top = torch.cat([row.argmax(-1) for row in rows])
        outputs = [continued(model, prompt, args.output) for prompt in prompts]
        first = first or (top, outputs)
        pairs = list(zip(outputs, first[1], strict=True))
        equal = sum(common(*pair) for pair in pairs)
        print(
            f"{format.name:<10}{float(loss.exp()):>12.4f}{float((top == first[0]).float().mean()):>10.1%}"
            f"{equal / (args.output * len(pairs)):>13.1%}{sum(a == b for a, b in pairs):>11}/{len(pairs)}"
        )


if __name__ == "__main__":
    main()
