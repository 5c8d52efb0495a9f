"""Recorded workloads in public formats. Only lengths, times and hashes are in them: the tokens are made up."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from engine.core.errors import ConfigError
from engine.lab.arrivals import Arrival, Piece, Workload, seed_of
from engine.lab.spelled import Source

MOONCAKE_BLOCK = 512


class Line(NamedTuple):
    """A request of a trace: seconds on the trace's own clock, its prompt, and how many tokens it was answered with; the
    rest as in ``Arrival``."""

    at: float
    prompt: tuple[Piece, ...]
    output: int
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None


class Trace(Source):
    """A file of requests. The first comes at the start; requests that were answered with nothing are left out."""

    bare: ClassVar[str] = "path"
    path: str = Field(..., description="the file")
    limit: int | None = Field(None, ge=1, description="read so many requests at most")
    skip: int = Field(0, ge=0, description="leave out so many at the beginning")
    faster: float = Field(1.0, gt=0, description="how many times the rate of the trace they come at")

    def make(self, seed: int = 0) -> Workload:
        """Raises ``ConfigError``, with the file and the line, where it cannot be read."""
        end = None if self.limit is None else self.skip + self.limit
        lines = list(islice((line for line in self._checked(seed) if line.output > 0), self.skip, end))
        if not lines:
            raise ConfigError(f"{self.path}: there is no request in it")
        start = min(line.at for line in lines)
        return Workload(
            [
                Arrival(
                    f"r{number}",
                    (line.at - start) / self.faster,
                    line.prompt,
                    line.output,
                    tenant=line.tenant,
                    priority=line.priority,
                    deadline=line.deadline,
                )
                for number, line in enumerate(lines)
            ],
            self.spelled(),
        )

    @abstractmethod
    def lines(self, seed: int) -> Iterator[Line]:
        """What the file says, line by line. May raise ``KeyError``, ``TypeError`` or ``ValueError``."""

    def _checked(self, seed: int) -> Iterator[Line]:
        lines, number = self.lines(seed), 0
        while True:
            number += 1
            try:
                line = next(lines)
            except StopIteration:
                return
            except OSError as error:
                raise ConfigError(f"{self.path}: {error.strerror or error}") from error
            except (KeyError, TypeError, ValueError) as error:
                what = f"no column {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"{self.path}: request {number} is not one of a {self.name} trace: {what}") from error
            if line.output > 0 and sum(piece.length for piece in line.prompt) < 1:
                raise ConfigError(f"{self.path}: request {number} has no prompt")
            yield line

    def _rows(self, columns: Sequence[str]) -> Iterator[dict[str, str]]:
        """Rows of a CSV file by column. Raises ``KeyError`` for a column that is not there."""
        with Path(self.path).open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            for name in columns:
                if name not in (rows.fieldnames or ()):
                    raise KeyError(name)
            yield from rows


class Mooncake(Trace):
    """JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one for each 512 tokens
    of the prompt: equal ids are equal tokens after an equal beginning. Source: the traces of Mooncake (Qin et al., FAST
    2025). Answers have no ids, so the next turn of a conversation finds only what stood in prompts.
    """

    name: ClassVar[str] = "mooncake"
    block: int = Field(MOONCAKE_BLOCK, ge=1, description="tokens that a hash id stands for")

    def lines(self, seed: int) -> Iterator[Line]:
        """The last block is as long as what is left of the prompt."""
        with Path(self.path).open(encoding="utf-8") as file:
            for text in file:
                if text.strip():
                    data = json.loads(text)
                    if not isinstance(data, dict):
                        raise ValueError("it is no JSON object")
                    yield self._line(data, seed)

    def _line(self, data: dict[str, object], seed: int) -> Line:
        left, ids = _whole(data["input_length"]), data["hash_ids"]
        if not isinstance(ids, list) or len(ids) != -(-left // self.block):
            raise ValueError(f"hash_ids must be {-(-left // self.block)} numbers, one for {self.block} tokens each")
        pieces = []
        for one in ids:
            pieces.append(Piece(seed_of(seed, "block", _whole(one)), min(self.block, left)))
            left -= self.block
        when = data["timestamp"]
        if isinstance(when, bool) or not isinstance(when, int | float):
            raise ValueError(f"timestamp {when!r} is no number")
        return Line(when / 1e3, tuple(pieces), _whole(data["output_length"]))


class Azure(Trace):
    """CSV with ``TIMESTAMP``, ``ContextTokens`` and ``GeneratedTokens``. Source: Azure's LLM inference traces of 2023
    (Patel et al., ISCA 2024) and 2024. Nothing is said of common beginnings: there are none.
    """

    name: ClassVar[str] = "azure"

    def lines(self, seed: int) -> Iterator[Line]:
        """Times are dates."""
        for number, row in enumerate(self._rows(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))):
            prompt = Piece(seed_of(seed, "azure", number), int(row["ContextTokens"]))
            yield Line(_seconds(row["TIMESTAMP"]), (prompt,), int(row["GeneratedTokens"]))


class BurstGPT(Trace):
    """CSV with ``Timestamp`` (s), ``Request tokens`` and ``Response tokens``, and columns that are not read (``Model``,
    ``Total tokens``, ``Log Type``, in later releases ``Session ID`` and ``Elapsed time``). Source: BurstGPT (Wang et
    al., KDD 2025). Failed requests have no response tokens.
    """

    name: ClassVar[str] = "burstgpt"
    model: str = Field("", description="only requests whose column Model is this")

    def lines(self, seed: int) -> Iterator[Line]:
        """Times are seconds."""
        columns = ("Timestamp", "Request tokens", "Response tokens", *(("Model",) if self.model else ()))
        for number, row in enumerate(self._rows(columns)):
            if self.model and row["Model"] != self.model:
                continue
            prompt = Piece(seed_of(seed, "burstgpt", number), int(row["Request tokens"]))
            yield Line(float(row["Timestamp"]), (prompt,), int(row["Response tokens"]))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens, or no hash id")
    return value


def _seconds(text: str) -> float:
    """Of a date with up to seven digits behind the second, with or without a zone."""
    head, point, tail = text.partition(".")
    digits = tail[: len(tail) - len(tail.lstrip("0123456789"))]
    zone = tail[len(digits) :]
    when = datetime.fromisoformat(head + zone)
    whole = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return whole + (float(f"0.{digits}") if point and digits else 0.0)


KINDS = (Mooncake, Azure, BurstGPT)
