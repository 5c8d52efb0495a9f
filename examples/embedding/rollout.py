"""Reinforcement learning with the engine as the rollout worker: generate, reward, a step of training, new weights.

A policy-gradient loop (REINFORCE; Williams, 1992) on a tiny model with random weights, which learns to say even digits.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from engine import LLM, SamplingParams

WORDS = [str(number) for number in range(16)]
PROMPT = [1, 2, 3, 4]
ROLLOUTS, LENGTH = 48, 8


def untrained(folder: Path) -> LlamaForCausalLM:
    """The trainer's model, which is also saved where the engine can load it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=None,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    policy.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    Tokenizer(models.WordLevel(vocabulary)).save(str(folder / "tokenizer.json"))
    return policy


def reward(tokens: tuple[int, ...]) -> float:
    """The share of even numbers."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def log_likelihood(policy: LlamaForCausalLM, rollouts: list[tuple[int, ...]]) -> torch.Tensor:
    """Of each rollout after the prompt, ``[rollouts]``."""
    ids = torch.tensor([[*PROMPT, *tokens] for tokens in rollouts])
    logits = policy(ids[:, :-1]).logits.log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None])[:, len(PROMPT) - 1 :, 0].sum(-1)


def train(llm: LLM, policy: LlamaForCausalLM, steps: int) -> list[float]:
    """The mean reward of each step's rollouts, which the engine generates with the weights of the step before."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    means: list[float] = []
    for step in range(steps):
        wishes = [SamplingParams(max_tokens=LENGTH, seed=1000 * step + n) for n in range(ROLLOUTS)]
        rollouts = [answer.token_ids for answer in llm.generate([PROMPT] * ROLLOUTS, wishes)]
        rewards = torch.tensor([reward(tokens) for tokens in rollouts])
        means.append(float(rewards.mean()))
        loss = -((rewards - rewards.mean()) * log_likelihood(policy, rollouts)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        llm.update_weights(policy.state_dict(), version=f"step-{step + 1}")
    return means


def main(steps: int = 10) -> list[float]:
    """Train; returns the mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        policy = untrained(Path(folder))
        with LLM(model=folder, kvcache="radix", page_size=1, num_pages=1024) as llm:
            return train(llm, policy, steps)


if __name__ == "__main__":
    for step, mean in enumerate(main(*map(int, sys.argv[1:2]))):
        print(f"step {step:2}  mean reward {mean:.2f}  {'#' * round(40 * mean)}")
