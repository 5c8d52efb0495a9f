"""Rules of what a backend need not be able to do, tried where it can: sliding windows, capped scores, pages of fp8."""

from __future__ import annotations

import random
from typing import Any

from engine.testing.guard import Violation
from engine.testing.suites.attention_bench import SCALE, AttentionBench

FP8 = "float8_e4m3fn"
LARGEST = 448.0  # number of that type


class AttentionFeatures(AttentionBench):
    """Part of ``AttentionSuite``."""

    # ---- windows

    def test_a_window_ends_where_it_says(self) -> None:
        """Where provided: with a window of w tokens, a query at position p reads positions p - w + 1 … p."""
        if not self.provided("window"):
            return
        count = min(self.head_dims[0], 12)
        for window in (1, 3, count - 1, count, count + 9):
            rows = [(0, count), (2, count - 2), (count - 1, 1)]
            for memory in self._memories(rows, **self._easy(), window=window):
                for row, position, seen in self._read(memory):
                    if seen != list(range(max(0, position - window + 1), position + 1)):
                        raise Violation(
                            f"with a window of {window}, the query at position {position} of row {row} "
                            f"({memory.rows[row]}) reads {seen}"
                        )

    def test_windows_equal_dense_attention(self) -> None:
        """Where provided: answers with windows of any size equal dense attention, as those without do."""
        if self.provided("window"):
            for at, window in enumerate(self.windows):
                self._ragged(f"window {at}", window=window, dtype=self._dtype(at))

    # ---- capped scores

    def test_capped_scores_equal_dense_attention(self) -> None:
        """Where provided: a score s, after the scale, counts as ``cap * tanh(s / cap)``; large ones, too."""
        if self.provided("soft-cap"):
            for at, cap in enumerate(self.soft_caps):
                self._ragged(f"cap {at}", soft_cap=cap, dtype=self._dtype(at))
            for memory in self._memories([(40, 1), (0, 9), (5, 30)], soft_cap=self.soft_caps[0]):
                memory.query *= 100
                self._finite(memory, "large scores under a cap")

    def test_windows_and_caps_meet(self) -> None:
        """Where both are provided: a layer may have a window and a cap."""
        if self.provided("window") and self.provided("soft-cap"):
            self._ragged("both", window=self.windows[len(self.windows) // 2], soft_cap=self.soft_caps[0])

    def test_features_are_a_layers_own(self) -> None:
        """Where provided: one layer with a window or a cap leaves the next one, of the same step, without."""
        features: dict[str, Any] = {"window": 3} if self.provided("window") else {}
        features |= {"soft_cap": self.soft_caps[0]} if self.provided("soft-cap") else {}
        for memory in self._memories([(40, 1), (0, 9), (5, 30)]) if features else ():
            backend = self._ready()
            backend.plan_batch(memory.batch)
            backend.write(memory.keys, memory.values, memory.k_pages, memory.v_pages)
            backend.attend(memory.query, memory.k_pages, memory.v_pages, SCALE, **features)
            answer = backend.attend(memory.query, memory.k_pages, memory.v_pages, SCALE)
            self._compare(memory, answer, "in a plain layer after one that is not")

    # ---- fp8

    def test_fp8_pages_equal_dense_attention(self) -> None:
        """Where provided: answers from pages of fp8 equal dense attention on what the pages hold, within the tolerance
        of the queries' type."""
        for at, dtype in enumerate(self._halves()):
            self._ragged(f"fp8 {at}", kv_dtype=FP8, dtype=dtype)

    def test_fp8_pages_hold_the_nearest_numbers(self) -> None:
        """Where provided: what is written becomes the nearest number of fp8, of two equally near the even one; beyond
        the largest, the largest. A scale is not applied."""
        import torch

        for dtype in self._halves():
            for memory in self._memories([(0, 40), (3, 1)], kv_dtype=FP8, dtype=dtype):
                sizes = torch.tensor([2.0**at for at in range(-12, 11)])
                for rows in (memory.row_keys, memory.row_values):
                    for content in rows:
                        spread = sizes[torch.arange(content.numel()) % len(sizes)].reshape(content.shape)
                        content[:] = (torch.randn(content.shape) * spread).to(content)
                        content[-1, :, :4] = torch.tensor([1e4, -1e4, 0.0, 17.0]).to(content)  # 17 lies in the middle
                memory.fill()
                memory.run(self._ready(), SCALE)
                for name, new, pages in (("K", memory.keys, memory.k_pages), ("V", memory.values, memory.v_pages)):
                    wanted = new.float().clamp(-LARGEST, LARGEST).to(pages.dtype).float()
                    for token in range(new.shape[0]):
                        row, position = memory.owner(token)
                        ((page, offset),) = memory.slots(row, position, position + 1)
                        wrong = pages[page, offset].float() != wanted[token]
                        if bool(wrong.any()):
                            told, found = (side[wrong][0].item() for side in (new[token], pages[page, offset].float()))
                            raise Violation(f"{name} of {told:g} is stored as {found:g} in pages of {FP8}")

    # ---- what they are written with

    def _halves(self) -> list[str]:
        types = [dtype for dtype in self.dtypes if dtype in ("float16", "bfloat16")]
        return types if self.provided("fp8-kv") else []

    def _dtype(self, at: int) -> str:
        return self.dtypes[at % len(self.dtypes)]

    def _ragged(self, seed: str, **features: Any) -> None:
        """Rows of all kinds, with another shape of heads and pages each time."""
        rng = random.Random(f"{self.seed} {seed}")
        sizes = {
            "heads": rng.choice(self.head_shapes),
            "page_size": rng.choice(self.page_sizes),
            "head_dim": rng.choice(self.head_dims),
        }
        rows = [(rng.randrange(1, 40), 1), (0, rng.randrange(2, 30)), (rng.randrange(150, 300), 1),
                (rng.randrange(60, 200), rng.randrange(2, 9)), (0, 1)]  # fmt: skip
        for memory in self._memories(rows, **sizes, **features):
            self._equal(memory, "with what a layer may have")
