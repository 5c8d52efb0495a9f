"""Backend ``flashinfer`` against a stand-in that computes what it plans, with the library's signatures and defaults.

No kernel of FlashInfer runs here: its wrappers cannot be built without a GPU. What is tried is how they are called.
"""

from __future__ import annotations

import builtins
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import flashinfer_front
import flashinfer_record as record
import flashinfer_standin as library
import pytest
import torch
from flashinfer_kit import ROWS, SHARING, SMALL, OnStandIn, close, expected, memory, on

from engine.core import AttentionLayer, Batch, ConfigError
from engine.core.registry import make
from engine.plugins.attention import flashinfer
from engine.testing import AttentionSuite


class Fast(AttentionSuite):
    plugin = OnStandIn
    options = SMALL
    dtypes = ("bfloat16", "float16")
    head_dims = (64, 128)
    head_shapes = ((2, 2), (9, 3), (5, 1), (8, 2))
    page_sizes = (1, 5, 16)
    long_context = 600


class TestSplit(Fast):
    page_sizes = (1, 2, 5, 16, 64, 128)
    long_context = 2000


class TestOnePrefill(Fast):
    options = {**SMALL, "mixed": "prefill", "tensor_cores": "always"}


class TestOneKernel(Fast):
    options = {**SMALL, "mixed": "batch"}


class TestCascade(Fast):
    options = {**SMALL, "cascade": 1, "cascade_rows": 2}


if importlib.util.find_spec("flashinfer"):

    class TestTheLibrarysOwnWrappers(Fast):
        """All of its Python, up to the launch."""

        dtypes = ("bfloat16",)

        @pytest.fixture(autouse=True)
        def library(self) -> Iterator[None]:
            with flashinfer_front.on_the_cpu() as installed:
                type(self).plugin = on(installed)
                yield

    class TestTheLibrarysOneKernel(TestTheLibrarysOwnWrappers):
        options = {**SMALL, "mixed": "batch", "tensor_cores": "always"}


# ---- the record


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None,
    reason="flashinfer, 855 MB, is not installed: neither its signatures nor its own wrappers are tried",
)
def test_the_installed_library_is_the_recorded_one() -> None:
    import json
    from importlib.metadata import version

    recorded = json.loads(record.RECORD.read_text())
    if version("flashinfer-python") != recorded["version"]:
        pytest.skip(f"flashinfer {version('flashinfer-python')} is installed, and {recorded['version']} was recorded")
    import flashinfer as installed

    assert record.record(installed, recorded["version"]) == recorded


def test_everything_that_is_called_is_recorded() -> None:
    """The wrappers' module names what it takes from the library: all of it is in the record, and nothing else."""
    source = Path(flashinfer.__file__).with_name("_flashinfer_wrappers.py").read_text()
    taken = {name.partition("(")[0] for name in source.split("library.")[1:]}
    assert taken == set(record.CALLED)


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper.run", {"q": 0, "paged_kv_cache": 0, "scale": 1}),
        ("BatchPrefillWithPagedKVCacheWrapper.plan", {"qo_indptr": 0}),
        ("BatchAttention.plan", {"window_left": 3}),
    ],
)
def test_unknown_and_missing_arguments_are_refused(name: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=name):
        library.bind(name, None, **keywords)


# ---- features of layers, in every way that a batch may be computed


@pytest.mark.parametrize("window", [None, 1, 5, 36])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("options", [{}, {"mixed": "prefill"}, {"mixed": "batch"}, SHARING], ids=str)
def test_windows_and_capped_scores(
    window: int | None, soft_cap: float | None, options: dict[str, Any], flashinfer_class: Any
) -> None:
    """Layers with and without them in turn, in one step, and again in the next."""
    backend = flashinfer_class(OnStandIn.Options(**SMALL, **options))
    for seed in range(2):
        given = memory(ROWS, shared=32, seed=seed)
        backend.plan_batch(given.batch)
        backend.write(given.keys, given.values, given.k_pages, given.v_pages)
        for features in ((None, None), (window, soft_cap), (None, soft_cap), (window, None)):
            asked = dict(zip(("window", "soft_cap"), features, strict=True))
            found = backend.attend(given.query, given.k_pages, given.v_pages, 0.2, **asked)
            close(found, expected(given, 0.2, **asked))


@pytest.mark.parametrize("options", [{}, {"mixed": "prefill"}, {"mixed": "batch"}, SHARING], ids=str)
def test_pages_of_fp8(options: dict[str, Any], flashinfer_class: Any) -> None:
    given = memory(ROWS, shared=32)
    given.row_keys[1][0, 0, 0] = given.row_values[1][0, 0, 0] = 1000.0  # fp8 ends at 448
    pages = [torch.zeros(given.k_pages.shape, dtype=torch.float8_e4m3fn) for _ in range(2)]
    for side, (fp8, content) in enumerate(zip(pages, (given.k_pages, given.v_pages), strict=True)):
        rounded = content.nan_to_num().clamp(-448, 448).to(torch.float8_e4m3fn)
        fp8.view(torch.uint8).copy_(rounded.view(torch.uint8))
        rows = (given.row_keys, given.row_values)[side]
        rows[:] = [row.clamp(-448, 448).to(torch.float8_e4m3fn).to(row.dtype) for row in rows]
    new = [torch.cat([row[start:] for row, (start, _) in zip(rows, given.rows, strict=True)]) for rows in
           (given.row_keys, given.row_values)]  # fmt: skip
    new = [torch.where(side == 448, 1000.0, side.float()).to(side.dtype) for side in new]
    backend = flashinfer_class(OnStandIn.Options(**SMALL, **options))
    backend.plan_batch(given.batch)
    backend.write(*new, *pages)
    close(backend.attend(given.query, *pages, 0.05), expected(given, 0.05, None, None))


def test_every_kernel_runs_before_the_first_step(flashinfer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"heads": 8, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.2}
    layers = [AttentionLayer(**one), AttentionLayer(**one, window=4), AttentionLayer(**one)]
    backend = flashinfer_class(OnStandIn.Options(**SMALL, **SHARING, mixed="batch"))
    backend.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    backend.expect(layers)
    ready = set(backend._impl._wrappers)
    assert {(kind, layer.window) for kind, layer in ready} == {
        *(("decode", None), ("prefill", None), ("batch", None), ("cascade", None), ("decode", 4), ("prefill", 4)),
    }
    given = memory(ROWS, shared=32)
    for features in ({}, {"window": 4}):
        backend.plan_batch(given.batch)
        backend.write(given.keys, given.values, given.k_pages, given.v_pages)
        wanted = expected(given, 0.2, **{"window": None, "soft_cap": None, **features})
        close(backend.attend(given.query, given.k_pages, given.v_pages, 0.2, **features), wanted)
    assert set(backend._impl._wrappers) == ready
    broken = mock.Mock(side_effect=RuntimeError("Ninja build failed"))
    monkeypatch.setattr(library, "BatchDecodeWithPagedKVCacheWrapper", broken)
    backend = OnStandIn(OnStandIn.Options(**SMALL))
    backend.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    with pytest.raises(ConfigError, match="kernels cannot be compiled or run: .*Ninja build failed"):
        backend.expect(layers)


def test_what_kernels_do_not_take_is_refused() -> None:
    backend = OnStandIn(OnStandIn.Options(**SMALL))
    one = {"heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.1}
    backend.plan_batch(Batch(starts=[0], counts=[1], pages=[[0]], page_size=4))
    for wrong, words in (
        ({"k_dim": 80, "v_dim": 80}, "heads of 64, 128 and 256 numbers, not of 80"),
        ({"v_dim": 128}, "K and V of one size, not of 64 and 128"),
        ({"kv_dtype": "int8"}, "pages of bfloat16 or float8_e4m3fn, not of int8"),
    ):
        with pytest.raises(ConfigError, match=words):
            backend.expect([AttentionLayer(**one), AttentionLayer(**{**one, **wrong})])
    with pytest.raises(ValueError, match="float16 and bfloat16, not float32"):
        backend.attend(torch.zeros(1, 2, 64), torch.zeros(1, 4, 1, 64), torch.zeros(1, 4, 1, 64), 1.0)
    with pytest.raises(ValueError, match="row 1 needs 2 pages of 4 and has 1"):
        backend.plan_batch(Batch(starts=[0, 4], counts=[2, 1], pages=[[0], [1]], page_size=4))
    with pytest.raises(RuntimeError, match="comes first"):
        OnStandIn().attend(*(torch.zeros(1, 1, 64) for _ in range(3)), 1.0)
    with pytest.raises(ConfigError, match="option workspace: .*at least 32MiB"):
        make("attention", "flashinfer", {"workspace": "1MiB"})


# ---- cascades


@pytest.mark.parametrize(
    ("rows", "shared", "cascaded"),
    [
        ([(40, 1)] * 4, 32, 4),
        ([(40, 1), (33, 1), (32, 1), (35, 1)], 32, 4),  # one has nothing of its own but its new token
        ([(40, 1), (31, 1), (90, 1), (35, 1)], 32, 3),  # one does not share
        ([(40, 1), (40, 1), (0, 5), (40, 1)], 32, 3),  # a prefill among them
        ([(40, 1)] * 2, 32, 0),  # too few
        ([(40, 1)] * 4, 12, 0),  # too short
        ([(40, 1)] * 4, 0, 0),
    ],
)
def test_a_shared_prefix_is_read_once(
    rows: list[tuple[int, int]], shared: int, cascaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    run = library.MultiLevelCascadeAttentionWrapper._merged
    monkeypatch.setattr(
        library.MultiLevelCascadeAttentionWrapper, "_merged",
        lambda self, q, cache, out: (seen.append(len(q)), run(self, q, cache, out))[1],
    )  # fmt: skip
    backend, given = OnStandIn(OnStandIn.Options(**SMALL, **SHARING)), memory(rows, shared)
    close(given.run(backend, 0.2), expected(given, 0.2, None, None))
    assert seen == ([cascaded] if cascaded else [])


def test_several_prefixes_are_one_cascade() -> None:
    given = memory([(40, 1)] * 7, 0)
    for members in ((0, 2, 5), (1, 3, 6)):  # 4 is alone
        for row in members[1:]:
            given.tables[row][:5] = given.tables[members[0]][:5]
            for side in (given.row_keys, given.row_values):
                side[row][:20] = side[members[0]][:20]
    given.fill()
    backend = OnStandIn(OnStandIn.Options(**SMALL, **SHARING))
    close(given.run(backend, 0.2), expected(given, 0.2, None, None))
    (wrapper,) = [w for (kind, _), w in backend._impl._wrappers.items() if kind == "cascade"]
    assert [level.queries.tolist() for level in wrapper._wrapper.levels] == [[0, 3, 6], list(range(7))]


# ---- who may use it


def test_why_not_is_said_and_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def no_import(name: str, *args: Any, **keywords: Any) -> Any:
        assert name.partition(".")[0] != "flashinfer"
        return imported(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_import)
    monkeypatch.setattr(flashinfer.importlib, "import_module", lambda name: pytest.fail(f"{name} is imported"))
    cuda = {"is_available": False, "get_device_name": "a GPU", "get_device_capability": (9, 0)}

    def refused(device: str = "cuda", dtype: str = "bfloat16") -> str:
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        with pytest.raises(ConfigError) as caught:
            flashinfer.FlashInferAttention().prepare(device=device, dtype=dtype)
        return str(caught.value)

    assert "computes on CUDA devices, not on cpu; torch sees none here" in refused("cpu", "float32")
    assert "computes float16 and bfloat16, not float32" in refused(dtype="float32")
    assert "torch sees no CUDA device here" in refused()
    cuda["is_available"] = True
    assert refused("cpu").endswith("computes on CUDA devices, not on cpu")
    cuda["get_device_capability"] = (7, 5)
    assert "needs compute capability 8.0; a GPU has 7.5" in refused()
    cuda["get_device_capability"] = (9, 0)
    installed: set[str] = set()
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: name if name in installed else None)
    assert "not installed: pip install 'sixhooks[gpu]'" in refused()
    installed.add("flashinfer")
    monkeypatch.setattr(flashinfer.shutil, "which", lambda *_, **__: None)
    assert "there is no nvcc" in refused()


def test_where_it_can_be_used_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_device", lambda device, dtype: "a GPU, sm_90")
    monkeypatch.setattr(flashinfer, "_installed", lambda: None)
    monkeypatch.setattr(flashinfer, "version", lambda name: "0.7.4")
    backend = OnStandIn(OnStandIn.Options(**SMALL, mixed="batch"))
    assert backend.prepare(device="cpu", dtype="bfloat16") == "flashinfer 0.7.4 (a GPU, sm_90, mixed batches by batch)"
    monkeypatch.setattr(OnStandIn, "_library", lambda self: importlib.import_module("no_such_library"))
    with pytest.raises(ConfigError, match="cannot be imported: .*no_such_library"):
        OnStandIn().prepare(device="cpu", dtype="bfloat16")
