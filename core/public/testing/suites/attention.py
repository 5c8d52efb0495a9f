"""What every attention backend must do: read what a row owns, all of it and nothing else, and answer exactly."""

from __future__ import annotations

import random
from typing import Any

from engine.core.protocols import Attention, Plugin
from engine.testing.guard import Violation
from engine.testing.suites.attention_bench import SCALE, same_bits
from engine.testing.suites.attention_features import AttentionFeatures


class AttentionSuite(AttentionFeatures):
    """Rules of an attention backend, against dense attention in float64 on memory where every stray read is NaN.

    A backend that provides some of ``attention:prefill``, ``attention:decode`` and ``attention:mixed`` is tried with
    those batches only; one that provides none of them, with all. ``attention:window``, ``attention:soft-cap`` and
    ``attention:fp8-kv`` are tried where they are provided.

    Class attributes:
        dtypes: types of K, V and queries that it takes.
        device: where the tensors are.
        tolerance: type -> largest error, absolute plus relative, of an answer. K and V are of size 1.
        page_sizes: tokens a page that it takes.
        head_shapes: (query heads, KV heads) that it takes.
        head_dims: sizes of a head that it takes.
        long_context: tokens of the longest row.
        windows: sizes of sliding windows that it is tried with.
        soft_caps: caps of scores that it is tried with.
        batch_invariant: a row must be answered bit for bit alike alone and in a batch. Where it need not, ``check``
            says how far the answers part.
    """

    # ---- what is written

    def test_writes_go_where_the_page_table_says(self) -> None:
        """K and V of a step land in the slots of their positions, bit for bit, and nothing else changes."""
        for memory in self._memories([(3, 2), (0, 6), (6, 1)]):
            import torch

            before = [pages.clone() for pages in (memory.k_pages, memory.v_pages)]
            memory.run(self._ready(), SCALE)
            sides = zip("KV", before, (memory.k_pages, memory.v_pages), (memory.keys, memory.values), strict=True)
            for name, wanted, pages, new in sides:
                for token in range(new.shape[0]):
                    row, at = memory.owner(token)
                    ((page, offset),) = memory.slots(row, at, at + 1)
                    wanted[page, offset] = new[token]
                same = (pages == wanted) | (pages.isnan() & wanted.isnan())
                if not bool(same.all()):
                    page, offset, *_ = torch.nonzero(~same)[0].tolist()
                    raise Violation(f"{name} in page {page}, offset {offset} is not what it must be after write")

    # ---- what is answered

    def test_every_answer_is_written(self) -> None:
        """The answer has the query's shape and type, and all of it is computed: none is what memory held before."""
        for memory in self._memories([(8, 1), (0, 6), (3, 4)], **self._easy()):
            answer = memory.run(self._ready(), SCALE)
            if answer.shape != memory.query.shape or answer.dtype != memory.query.dtype:
                raise Violation(f"a query {list(memory.query.shape)} of {memory.query.dtype} is answered by "
                                f"{list(answer.shape)} of {answer.dtype}")  # fmt: skip
            self._no_nan(memory, answer, "memory that nobody wrote")

    def test_nothing_else_is_changed(self) -> None:
        """Queries, K, V and page tables are read, and attend leaves the pages as they are."""
        for memory in self._memories([(8, 1), (0, 6), (3, 4)]):
            backend, batch = self._ready(), memory.batch
            tables = [list(table) for table in batch.pages]
            keys, values, query = memory.keys, memory.values, memory.query.clone()
            backend.plan_batch(batch)
            backend.write(keys, values, memory.k_pages, memory.v_pages)
            pages = [side.clone() for side in (memory.k_pages, memory.v_pages)]
            backend.attend(memory.query, memory.k_pages, memory.v_pages, SCALE)
            things = [
                ("the page table", batch.pages == tables),
                ("the query", bool((query == memory.query).all())),
                ("the new K or V", bool((keys == memory.keys).all() and (values == memory.values).all())),
                ("a page", all(same_bits(*pair) for pair in zip(pages, (memory.k_pages, memory.v_pages), strict=True))),
            ]
            for name, kept in things:
                if not kept:
                    raise Violation(f"{name} is another one after attend")

    # ---- what is read

    def test_nothing_beyond_a_rows_length_is_read(self) -> None:
        """What lies behind a row's last token, and in pages that no row owns, reaches no answer: there may be NaN."""
        for memory in self._memories([(4, 1), (5, 1), (6, 1), (0, 3), (2, 4)], heads=self._plain(), shuffled=False):
            self._finite(memory, "slots beyond the row's length")

    def test_nobody_sees_the_future(self) -> None:
        """A query at position p reads positions 0 … p: all of them, itself included, and none after it."""
        count = min(self.head_dims[0], 7)
        rows = [(0, count), (2, count - 2), (count - 1, 1)]
        for memory in self._memories(rows, **self._easy()):
            for row, position, seen in self._read(memory):
                if seen != list(range(position + 1)):
                    raise Violation(f"the query at position {position} of row {row} ({memory.rows[row]}) reads {seen}")

    def test_page_tables_are_followed(self) -> None:
        """Position p of a row is read in page ``pages[p // page_size]``, whatever the order of pages; entries of the
        table beyond the row's length mean nothing."""
        for memory in self._memories([(11, 1), (0, 9), (5, 3)], heads=self._plain(), poison=7.0):
            for table in memory.tables:
                table.reverse()
                table.append(memory.tables[0][0])
            memory.fill()
            self._equal(memory, "with its pages in reverse", scale=memory.shape.head_dim**-0.5)

    def test_query_heads_read_their_own_kv_head(self) -> None:
        """Query head h reads KV head ``h // (heads / kv_heads)``."""
        for heads, kv_heads in self.head_shapes:
            for memory in self._memories([(3, 1), (0, 4)], heads=(heads, kv_heads)):
                for values in memory.row_values:
                    for kv_head in range(kv_heads):
                        values[:, kv_head] = kv_head
                memory.fill()
                found = memory.run(self._ready(), SCALE)[0].double().mean(-1).tolist()
                for head, value in enumerate(found):
                    if abs(value - head // (heads // kv_heads)) > 0.25:
                        raise Violation(
                            f"of {heads} query heads over {kv_heads} KV heads, head {head} must read KV head "
                            f"{head // (heads // kv_heads)}; it answers as if it read {value:.2f}"
                        )

    def test_rows_do_not_meet(self) -> None:
        """NaN in the K and V of one row reaches no answer of another."""
        import torch

        for memory in self._memories([(8, 1), (9, 1), (7, 1), (0, 5), (0, 6)]):
            if len(memory.rows) < 2:
                continue
            memory.row_keys[1][:] = memory.row_values[1][:] = float("nan")
            memory.fill()
            answer = memory.run(self._ready(), SCALE)
            for token in torch.nonzero(answer.isnan().flatten(1).any(1)).flatten().tolist():
                if memory.owner(token)[0] != 1:
                    raise Violation(f"row 1 holds NaN, and so does the answer to row {memory.owner(token)[0]}")

    # ---- the numbers

    def test_the_scale_is_the_callers(self) -> None:
        """Scores are multiplied by the scale that attend is given, whatever the size of a head."""
        for memory in self._memories([(8, 1), (0, 6), (3, 4)], **self._easy()):
            for scale in (SCALE, 0.05):
                self._equal(memory, f"with a scale of {scale}", scale=scale)

    def test_scores_may_be_large(self) -> None:
        """Scores in the thousands are no reason for infinity: the largest decides."""
        for memory in self._memories([(40, 1), (0, 9), (5, 30)]):
            memory.query *= 100
            if memory.shape.dtype in ("float32", "float64"):
                self._equal(memory, "with large scores", scale=1.0, slack=50)
            else:  # which of two large scores is larger depends on their rounding
                self._finite(memory, "large scores")

    def test_a_plan_holds_for_all_layers_until_the_next(self) -> None:
        """plan_batch is told once a step, for all layers; the next one replaces it, larger or smaller."""
        backend = self._ready()
        steps = ([(9, 1), (0, 12), (3, 5)], [(4, 1), (0, 7), (2, 2)], [(30, 1), (0, 2)], [(5, 1), (6, 1), (0, 9)])
        for kind in zip(*(self._memories(rows) for rows in steps), strict=True):
            for memory in kind:
                backend.plan_batch(memory.batch)
                for layer in range(2):
                    self._compare(memory, memory.layer(backend, SCALE), f"in layer {layer}")
                    memory.query = memory.query.flip(0)
                    memory.fill()

    def test_rows_may_share_pages(self) -> None:
        """A row reads what another row of the same step writes: both have the page in their tables."""
        size = self._shape().page_size
        for kind, rows in (("prefill", [(0, size), (size, 3)]), ("mixed", [(0, size), (size, 1)])):
            if kind not in self.kinds():
                continue
            memory = self._memory(rows)
            memory.tables[1][0] = memory.tables[0][0]
            memory.row_keys[1][:size], memory.row_values[1][:size] = memory.row_keys[0], memory.row_values[0]
            memory.fill()
            for side in (memory.k_pages, memory.v_pages):
                side[memory.tables[0][0]] = float("nan")  # computed in this very step
            self._equal(memory, "on a page that another row writes")

    def test_pages_are_empty_and_full(self) -> None:
        """Rows may end one token before, at, and one token after the end of a page, with pages to spare behind them."""
        for size in self.page_sizes:
            ends = (size, 2 * size) if size <= 16 else (size,)
            edges = sorted({length for end in ends for length in (end - 1, end, end + 1) if length > 0})
            rows = [(length - 1, 1) for length in edges] + [(0, n) for n in edges] + [(n, 2) for n in edges]
            for memory in self._memories(rows, page_size=size, spare_tokens=2 * size):
                self._equal(memory, f"with pages of {size}")

    def test_contexts_may_be_long(self) -> None:
        """Long rows beside short ones."""
        long = self.long_context
        for memory in self._memories([(long - 1, 1), (3, 1), (long // 2, 33), (0, 5)], page_size=self._page(16)):
            self._equal(memory, f"beside or in a context of {long}", slack=2)

    def test_ragged_batches_equal_dense_attention(self, situation: Any) -> None:
        """Fresh prompts, chunks behind a context and decodes, in batches of their own or mixed in any order, equal
        dense attention within the tolerance of the type."""
        for seed in range(self.seed, self.seed + 2):
            rng = random.Random(f"{seed} {situation}")
            for kind in self.kinds():
                rows = [_random_row(rng, kind) for _ in range(rng.randrange(1, 9))]
                memory = self._memory(rows, shape=situation, seed=seed, spare_tokens=rng.randrange(20))
                self._equal(memory, f"in a batch of kind {kind}")

    # ---- again

    def test_it_decides_the_same_again(self) -> None:
        """The same batch has the same answer, bit for bit."""
        for memory in self._memories([(40, 1), (0, 20), (7, 30), (200, 1)]):
            one, two = (memory.run(self._ready(), SCALE) for _ in range(2))
            if not same_bits(one, two):
                raise Violation(f"the same batch {memory.rows} is answered twice, and the answers differ")

    def test_company_changes_no_bit(self) -> None:
        """Where the suite asks for it: a row is answered alike, bit for bit, alone and in any batch."""
        apart = self.variance() if self.batch_invariant else 0.0
        if apart:
            raise Violation(f"a row is answered otherwise in a batch than alone: by {apart:.1e} at most")

    def variance(self) -> float:
        """How far the answers to a row alone and in a batch part at most. 0: not in a single bit."""
        apart = 0.0
        for memory in self._memories([(40, 1), (0, 20), (7, 30), (200, 1), (41, 1), (0, 3)]):
            together, first = memory.run(self._ready(), SCALE), 0
            for row, (_, count) in enumerate(memory.rows):
                part = slice(first, first + count)
                alone = self._alone(memory, row, part)
                apart = max(apart, float((alone.double() - together[part].double()).abs().max()))
                first += count
        return apart

    def notes(self) -> list[str]:
        """How far a row's answer depends on its company."""
        apart = self.variance()
        words = "bit for bit" if not apart else f"to within {apart:.1e}"
        return [f"batch invariance: a row is answered alike alone and in a batch {words}"]

    def try_once(self, plugin: Plugin) -> None:
        """One batch."""
        assert isinstance(plugin, Attention)
        self._memories([(3, 1), (0, 4)])[0].run(plugin, SCALE)
        plugin.close()


def _random_row(rng: random.Random, kind: str) -> tuple[int, int]:
    start = rng.choice((0, rng.randrange(1, 40), rng.randrange(1, 300)))
    single = kind == "decode" or (kind == "mixed" and rng.random() < 0.5)
    return start, 1 if single else rng.randrange(2, 50)
