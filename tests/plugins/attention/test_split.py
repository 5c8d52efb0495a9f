"""Backend ``split``: two backends for one model; and ``auto``, which goes by the model's layers too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core import Attention, AttentionLayer, Batch, ConfigError
from engine.core.native import why_not
from engine.core.registry import make
from engine.plugins.attention import auto, split
from engine.plugins.attention.auto import AutoAttention
from engine.plugins.attention.split import SplitAttention
from engine.testing import AttentionSuite

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Fast(AttentionSuite):
    plugin = "split"
    dtypes = ("float32",)
    page_sizes = (1, 4, 16)
    long_context = 600


@needs_kernels
class TestPrefillByCPU(Fast):
    options = {"prefill": "cpu", "decode": "torch"}


@needs_kernels
class TestDecodeByCPU(Fast):
    options = {"prefill": "torch", "decode": "cpu"}


class Watched(Attention):
    """Keeps what it is told; answers its number."""

    name = "watched"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:graphs", "attention:fp8-kv"})

    def __init__(self, number: float, *more: str) -> None:
        super().__init__()
        self.number, self.told = number, []
        self.provides = type(self).provides | set(more)

    def prepare(self, *, device: str, dtype: str) -> str:
        return f"{self.number} in {dtype}"

    def expect(self, layers: Any) -> None:
        self.told.append(("expect", len(layers)))

    def start(self, context: Any) -> None:
        self.told.append(("start", context))

    def plan_batch(self, batch: Batch) -> None:
        self.told.append(("batch", list(batch.starts), list(batch.counts)))

    def plan_graph(self, batch: Batch) -> None:
        self.told.append(("graph", len(batch.counts)))

    def write(self, keys: Any, values: Any, k_pages: Any, v_pages: Any) -> None:
        self.told.append(("write", keys[:, 0, 0].tolist()))

    def attend(self, query: Any, k_pages: Any, v_pages: Any, scale: float, **features: Any) -> Any:
        self.told.append(("attend", query[:, 0, 0].tolist(), features))
        return query * 0 + self.number

    def close(self) -> None:
        self.told.append("close")


LAYER = {"heads": 2, "kv_heads": 1, "k_dim": 8, "v_dim": 8, "scale": 0.3}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[SplitAttention, Watched, Watched]:
    made = {"one": Watched(1.0, "attention:window"), "two": Watched(2.0, "attention:soft-cap")}
    monkeypatch.setattr(split, "make", lambda role, name, options: made[name])
    return SplitAttention(SplitAttention.Options(prefill="one", decode="two")), made["one"], made["two"]


def test_each_gets_its_rows(pair: Any) -> None:
    both, prefill, decode = pair
    both.plan_batch(Batch(starts=[4, 0, 7, 9, 2], counts=[1, 3, 1, 1, 2], pages=[[0]] * 5, page_size=99))
    tokens = torch.arange(8.0)[:, None, None].expand(8, 1, 4)
    both.write(tokens, tokens, torch.zeros(1), torch.zeros(1, 1, 1, 4))
    found = both.attend(tokens, torch.zeros(1), torch.zeros(1, 1, 1, 4), 1.0, window=3)
    assert found[:, 0, 0].tolist() == [2, 1, 1, 1, 2, 2, 1, 1]
    features = {"window": 3}
    assert prefill.told == [
        ("batch", [0, 2], [3, 2]), ("write", [1, 2, 3, 6, 7]), ("attend", [1, 2, 3, 6, 7], features)
    ]  # fmt: skip
    assert decode.told == [
        ("batch", [4, 7, 9], [1, 1, 1]), ("write", [0, 4, 5]), ("attend", [0, 4, 5], features)
    ]  # fmt: skip


@pytest.mark.parametrize("counts", [[1, 1], [2, 3]])
def test_a_step_of_one_kind_is_one_backends(pair: Any, counts: list[int]) -> None:
    both, prefill, decode = pair
    both.plan_batch(Batch(starts=[4, 0], counts=counts, pages=[[0]] * 2, page_size=99))
    tokens = torch.zeros(sum(counts), 1, 4)
    both.write(tokens, tokens, torch.zeros(1), torch.zeros(1))
    both.attend(tokens, torch.zeros(1), torch.zeros(1), 1.0)
    busy, idle = (decode, prefill) if counts[0] == 1 else (prefill, decode)
    assert [each[0] for each in busy.told] == ["batch", "write", "attend"]
    assert not idle.told


def test_both_are_told_and_graphs_are_of_decodes(pair: Any) -> None:
    both, prefill, decode = pair
    assert both.prepare(device="cpu", dtype="float32") == "prefill by 1.0 in float32; decode by 2.0 in float32"
    both.expect([AttentionLayer(**LAYER)] * 3)
    both.start("context")
    both.plan_graph(Batch(starts=[0, 1], counts=[1, 1], pages=[[0]] * 2, page_size=9))
    both.close()
    assert prefill.told == [("expect", 3), ("start", "context"), "close"]
    assert decode.told == [("expect", 3), ("start", "context"), ("graph", 2), "close"]
    assert both.provides == split.SplitAttention.provides | {"attention:graphs", "attention:fp8-kv"}


def test_what_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be one of its own"):
        make("attention", "split", {"prefill": "split"})
    with pytest.raises(RuntimeError, match="plan_batch"):
        make("attention", "split", {"prefill": "torch", "decode": "torch"}).attend(0, 0, 0, 1.0)
    with pytest.raises(ConfigError, match="option cascade"):
        make("attention", "split", {"decode": "flashinfer", "decode_options": {"cascade": "few"}})
    lone = Watched(1.0)
    lone.provides = frozenset({"attention:prefill"})
    monkeypatch.setattr(split, "make", lambda role, name, options: lone)
    with pytest.raises(ConfigError, match="attention two does not compute batches of kind decode"):
        SplitAttention(SplitAttention.Options(prefill="one", decode="two"))


# ---- auto, by the layers


def test_auto_goes_on_where_layers_are_not_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(Watched):
        def expect(self, layers: Any) -> None:
            raise ConfigError("attention picky has no head of 8")

    class Frank(Watched):
        def expect(self, layers: Any) -> str:
            self.told.append("expect")
            return "frank, in twos"

    made = {"plain": Watched(1.0), "picky": Picky(2.0, "attention:window"), "frank": Frank(3.0, "attention:window")}
    monkeypatch.setattr(auto, "make", lambda role, name: made[name])
    backend = AutoAttention(AutoAttention.Options(order=("plain", "picky", "frank")))
    assert backend.provides == AutoAttention.provides
    assert backend.prepare(device="cpu", dtype="float32") == "1.0 in float32"
    assert backend.provides == made["plain"].provides
    assert backend.expect([AttentionLayer(**LAYER), AttentionLayer(**LAYER, window=4)]) == (
        "frank, in twos; not attention watched does not provide attention:window; not attention picky has no head of 8"
    )
    assert backend.provides == made["frank"].provides
    assert [made[name].told for name in made] == [["close"], ["close"], ["expect"]]
    backend.plan_graph(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    assert made["frank"].told[-1] == ("graph", 1)
    lost = AutoAttention(AutoAttention.Options(order=("plain", "picky")))
    lost.prepare(device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="no attention backend of plain, picky can: .*window; attention picky"):
        lost.expect([AttentionLayer(**LAYER, window=4)])


def test_auto_keeps_to_its_choice_where_layers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Watched(1.0)
    monkeypatch.setattr(auto, "make", lambda role, name: first)
    backend = AutoAttention(AutoAttention.Options(order=("plain",)))
    assert backend.prepare(device="cpu", dtype="float32") == "1.0 in float32"
    assert backend.expect([AttentionLayer(**LAYER)]) == "1.0 in float32"
    assert backend.attend(torch.zeros(1, 1, 1), None, None, 1.0, window=2).item() == 1.0
