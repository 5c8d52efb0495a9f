"""The GGUF reader: against files that the gguf package writes, and against the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.core.errors import ModelError
from engine.core.models import gguf_llama
from engine.core.models.gguf_file import GGUFFile
from engine.core.models.gguf_quants import dequantize
from engine.core.models.source import ModelSource


def write_llama(
    path: Path, *, architecture: str = "llama", seed: int = 0, **extra: str
) -> dict[str, np.ndarray[Any, Any]]:
    """A llama of one layer, 4 heads, 2 KV heads, head_dim 4, with random weights. Returns what was written."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.words", ["één", "", "δύο"])
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    shapes = {"token_embd": (10, 16), "output_norm": (16,), "output": (10, 16)}
    shapes |= {f"blk.0.{name}": (16,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {
        "blk.0.attn_q": (16, 16),
        "blk.0.attn_k": (8, 16),
        "blk.0.attn_v": (8, 16),
        "blk.0.attn_output": (16, 16),
    }
    shapes |= {"blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32)}
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_metadata_and_tensors_come_back_as_written(tmp_path: Path) -> None:
    written = write_llama(tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert file.metadata["test.numbers"] == [1, 2, 3]
        assert file.metadata["test.words"] == ["één", "", "δύο"]
        assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
        assert file.tensors.keys() == written.keys()
        for name, tensor in written.items():
            np.testing.assert_array_equal(file.tensor(name), tensor)


def test_rope_rows_are_put_back_into_the_order_of_transformers(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    rng = np.random.default_rng(7)
    original = rng.standard_normal((16, 16)).astype(np.float32)
    # llama.cpp's converter, word for word: halves of each head interleaved
    permuted = original.reshape(4, 2, 2, 16).swapaxes(1, 2).reshape(16, 16)
    np.testing.assert_array_equal(gguf_llama.unpermute(permuted, heads=4), original)
    with GGUFFile(tmp_path / "m.gguf") as file:
        state = dict(gguf_llama.weights(file))
        k = file.tensor("blk.0.attn_k.weight")
    np.testing.assert_array_equal(state["model.layers.0.self_attn.k_proj.weight"], gguf_llama.unpermute(k, heads=2))
    assert len(state) == 12


def test_config_is_what_transformers_would_have(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        config = gguf_llama.hf_config(file)
        assert gguf_llama.eos_ids(file) == {2, 5}
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 4
    assert config["vocab_size"] == 10
    assert config["tie_word_embeddings"] is False
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", architecture="mamba")
    with GGUFFile(tmp_path / "m.gguf") as file, pytest.raises(ModelError, match="'mamba' is not supported"):
        gguf_llama.hf_config(file)


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", llama__rope__scaling__type="yarn")
    with GGUFFile(tmp_path / "m.gguf") as file, pytest.raises(ModelError, match="scaled RoPE"):
        gguf_llama.hf_config(file)


@pytest.mark.parametrize("kept", [3, 20, 100, 1200])
def test_damaged_files_are_model_errors(tmp_path: Path, kept: int) -> None:
    write_llama(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        GGUFFile(tmp_path / "cut.gguf")


def test_files_that_are_not_gguf_are_model_errors(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GGUFFile(tmp_path / "x.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile(tmp_path / "empty.gguf")


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("same", 0), ("b", 1)):
        write_llama(tmp_path / f"{name}.gguf", seed=seed)
    prints = [GGUFFile(tmp_path / f"{name}.gguf").fingerprint() for name in ("a", "same", "b")]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "BF16"])
def test_every_format_gives_the_bits_of_the_gguf_package(form: str) -> None:
    kind = GGMLQuantizationType[form]
    elements, size = GGML_QUANT_SIZES[kind]
    groups = max(1, 256 // elements) * 4
    raw = np.random.default_rng(0).integers(0, 60, (groups, size), dtype=np.uint8)  # small bytes: finite halves
    expected = gguf.quants.dequantize(raw, kind).reshape(-1)
    np.testing.assert_array_equal(dequantize(raw.reshape(-1), kind.value), expected)


@pytest.mark.model
def test_default_model_weights_equal_the_gguf_package(default_source: ModelSource) -> None:
    """A tensor of each format, from the file's own bytes, bit for bit."""
    with GGUFFile(default_source.path) as file:
        assert gguf_llama.hf_config(file)["tie_word_embeddings"] is True
        assert len(file.tensors) == 272
        for name in ("blk.3.ffn_down.weight", "blk.29.attn_q.weight", "output_norm.weight"):
            info = file.tensors[name]
            with default_source.path.open("rb") as handle:
                handle.seek(info.offset)
                raw = np.frombuffer(handle.read(info.nbytes), np.uint8)
            kind = GGMLQuantizationType(info.kind)
            rows = raw.reshape(info.shape[0], -1) if len(info.shape) > 1 else raw.view(np.float32)
            expected = gguf.quants.dequantize(rows, kind).reshape(info.shape)
            np.testing.assert_array_equal(file.tensor(name), expected)
