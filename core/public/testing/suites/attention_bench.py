"""An attention backend on the bench: which shapes it takes, batches of rows, and answers compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from engine.core.protocols import Attention
from engine.testing.guard import Violation
from engine.testing.suites.base import Suite

if TYPE_CHECKING:
    from engine.testing.paged import PagedMemory, Row, Shape

KINDS = ("prefill", "decode", "mixed")
SCALE = 0.3  # not the usual one: a backend that takes its own is seen


class AttentionBench(Suite):
    """What the rules of an attention backend are written with."""

    role = "attention"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[Mapping[str, float]] = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
    page_sizes: ClassVar[tuple[int, ...]] = (1, 2, 5, 16, 64, 128)
    head_shapes: ClassVar[tuple[tuple[int, int], ...]] = ((2, 2), (9, 3), (6, 1), (8, 2))
    head_dims: ClassVar[tuple[int, ...]] = (16, 64)
    long_context: ClassVar[int] = 3000
    windows: ClassVar[tuple[int, ...]] = (1, 2, 7, 100, 4000)
    soft_caps: ClassVar[tuple[float, ...]] = (2.0, 30.0)
    batch_invariant: ClassVar[bool] = False

    @classmethod
    def situations(cls) -> list[Any]:
        """Every page size, with heads and types in turn; and every type with every shape of heads at least once."""
        shapes = [
            cls._shape(page_size=size, heads=heads, head_dim=cls.head_dims[at % len(cls.head_dims)], dtype=dtype)
            for dtype in cls.dtypes
            for at, (size, heads) in enumerate(_in_turn(cls.page_sizes, cls.head_shapes))
        ]
        return list(dict.fromkeys(shapes))

    @classmethod
    def _shape(cls, *, heads: tuple[int, int] | None = None, **sizes: Any) -> Shape:
        from engine.testing.paged import Shape

        query_heads, kv_heads = heads or cls.head_shapes[0]
        common = {"page_size": cls._page(4), "head_dim": cls.head_dims[0], "dtype": cls.dtypes[0]}
        return Shape(heads=query_heads, kv_heads=kv_heads, device=cls.device, **{**common, **sizes})

    @classmethod
    def _page(cls, wanted: int) -> int:
        """The smallest page size from ``wanted`` on, or the largest there is."""
        return next((size for size in sorted(cls.page_sizes) if size >= wanted), max(cls.page_sizes))

    def kinds(self) -> tuple[str, ...]:
        """The kinds of batches that the backend says it takes."""
        offered = [kind for kind in KINDS if self.provided(kind)]
        return tuple(offered or KINDS)

    def provided(self, what: str) -> bool:
        """Whether the backend says that it can: ``window`` for ``attention:window``."""
        return f"attention:{what}" in self.found().cls.provides

    # ---- batches

    def _ready(self) -> Attention:
        backend: Attention = self.make()
        return backend

    def _plain(self) -> tuple[int, int]:
        """Heads of which as many as possible have a KV head of their own."""
        return min(self.head_shapes, key=lambda pair: (pair[0] // pair[1], pair))

    def _easy(self) -> dict[str, Any]:
        """Where nothing is wrong but what a rule is about."""
        return {"heads": self._plain(), "shuffled": False, "poison": 0.0}

    def _memory(
        self, rows: Sequence[tuple[int, int]], *, shape: Shape | None = None, seed: int = 0, shuffled: bool = True,
        poison: float = float("nan"), spare_tokens: int = 0, **sizes: Any,
    ) -> PagedMemory:  # fmt: skip
        from engine.testing.paged import PagedMemory, Row

        given: list[Row] = [Row(*row) for row in rows]
        where = shape or self._shape(**sizes)
        return PagedMemory(where, given, seed=seed, shuffled=shuffled, poison=poison, spare_tokens=spare_tokens)

    def _memories(self, rows: Sequence[tuple[int, int]], **settings: Any) -> list[PagedMemory]:
        """The rows in as few batches as the backend takes: all, or those of each kind."""
        kinds = self.kinds()
        decodes, prefills = ([row for row in rows if (row[1] == 1) == single] for single in (True, False))
        batches = [list(rows)] if "mixed" in kinds else []
        batches += [part for kind, part in (("decode", decodes), ("prefill", prefills)) if kind in kinds and part]
        return [self._memory(part, **settings) for part in batches]

    def _alone(self, memory: PagedMemory, row: int, part: slice) -> Any:
        from engine.testing.paged import PagedMemory

        lone = PagedMemory(memory.shape, [memory.rows[row]])
        lone.row_keys, lone.row_values = [memory.row_keys[row]], [memory.row_values[row]]
        lone.query = memory.query[part]
        lone.fill()
        return lone.run(self._ready(), SCALE)

    def _read(self, memory: PagedMemory) -> Iterator[tuple[int, int, list[int]]]:
        """Row and position of each query, and the positions that it reads, no row being longer than a head.

        Everybody is worth the same, and the value at position p is 1 at p and 0 elsewhere. Mutates the memory.
        """
        for keys, values in zip(memory.row_keys, memory.row_values, strict=True):
            keys[:] = 0
            values[:] = 0
            for at in range(values.shape[0]):
                values[at, :, at] = 1
        memory.fill()
        answer = memory.run(self._ready(), SCALE)[:, 0].double()
        for token, parts in enumerate(answer.tolist()):
            yield *memory.owner(token), [at for at, part in enumerate(parts) if not abs(part) < 1e-3]

    def _equal(self, memory: PagedMemory, where: str, *, scale: float = SCALE, slack: float = 1) -> None:
        self._compare(memory, memory.run(self._ready(), scale), where, scale=scale, slack=slack)

    def _compare(self, memory: PagedMemory, answer: Any, where: str, *, scale: float = SCALE, slack: float = 1) -> None:
        limit = self.tolerance[memory.shape.dtype] * slack
        wanted = memory.expected(scale)
        wrong = ~((answer.double() - wanted).abs() <= limit * (1 + wanted.abs())).flatten(1).all(1)
        for token in wrong.nonzero().flatten().tolist():
            row, position = memory.owner(token)
            error = float((answer[token].double() - wanted[token]).abs().max())
            raise Violation(
                f"{where}, position {position} of row {row} ({memory.rows[row]}, {memory.shape}) is off by "
                f"{error:.2g}; {limit:g} is allowed"
            )

    def _finite(self, memory: PagedMemory, what: str) -> None:
        self._no_nan(memory, memory.run(self._ready(), SCALE), what)

    @staticmethod
    def _no_nan(memory: PagedMemory, answer: Any, what: str) -> None:
        for token in answer.isnan().flatten(1).any(1).nonzero().flatten().tolist():
            row, position = memory.owner(token)
            raise Violation(f"the answer at position {position} of row {row} ({memory.rows[row]}) comes from {what}")


def same_bits(one: Any, two: Any) -> bool:
    """Whether two tensors are equal, NaN included."""
    return bool(((one == two) | (one.isnan() & two.isnan())).all())


def _in_turn(sizes: Sequence[int], heads: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    return [(sizes[at % len(sizes)], heads[at % len(heads)]) for at in range(max(len(sizes), len(heads)))]
