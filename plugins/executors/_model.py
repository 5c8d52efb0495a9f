"""A causal language model of transformers that runs flattened batches over paged KV."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from engine.core.errors import ModelError
from engine.core.models import gguf_llama, hf_dir
from engine.core.models.gguf_file import GGUFFile
from engine.core.models.source import ModelSource
from engine.core.native import Kernels
from engine.core.native.kernels import Format
from engine.plugins.executors._fused import FusedDecoder, NotFused
from engine.plugins.executors._native import pack_native
from engine.plugins.executors._packed import pack_linears
from engine.plugins.executors._paged import IMPLEMENTATION, LayerShape, Probe, active, current, register

CPU = torch.device("cpu")


class LoadedModel:
    """A model in memory, ready to run.

    Attributes:
        device: where it computes.
        layers: the shape of each attention layer's KV.
        max_model_len: positions that the model knows.
        fingerprint: digest of weights and config (not of dtype).
        hidden_size: numbers of a hidden state; 0 where the decoder does not give them.
    """

    def __init__(self, module: nn.Module, eos_ids: frozenset[int], fingerprint: str) -> None:
        self.module = module
        self.config: Any = module.config
        self.device: torch.device = next(module.parameters()).device
        self.config.get_text_config().pad_token_id = None  # some models look for it in every batch, and wait for it
        self.eos_ids = eos_ids
        self.fingerprint = fingerprint
        self.max_model_len = _max_length(self.config)
        self.vocab_size = int(module.get_output_embeddings().weight.shape[0])
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.fused: FusedDecoder | None = None
        self.not_fused = ""
        self._keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.hidden_size = 0
        self.layers = self._probe()

    def run(self, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Logits ``[kept, vocab]`` of the tokens at indices ``keep`` of a flattened batch ``ids, positions [tokens]``.

        Where nothing is kept the output embedding is not computed at all. KV is written through the active layer.
        """
        if self.fused is not None:
            return self.fused.run(ids, positions, keep, current())
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        if not keep.numel():
            self.module.get_decoder()(**inputs)
            return torch.empty(0, self.vocab_size, device=self.device)
        if self._keeps:  # the model's own forward, so that scaled or capped logits come out right
            logits: Tensor = self.module(**inputs, logits_to_keep=keep).logits[0]
            return logits
        everything: Tensor = self.module(**inputs).logits[0]
        return everything.index_select(0, keep)

    def run_with_states(self, ids: Tensor, positions: Tensor, keep: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """As ``run``; and hidden states ``[places, width]``, after the final norm, of the tokens at ``places``."""
        if self.fused is not None:
            states = self.fused.states(ids, positions, torch.cat([keep, places]), current())
            return self.fused.logits(states[: len(keep)]), states[len(keep) :]
        said: list[Any] = []
        with self.module.get_decoder().register_forward_hook(lambda module, args, output: said.append(output[0])):
            logits = self.run(ids, positions, keep)
        return logits, said[0][0].index_select(0, places)

    def pack(self) -> int:
        """Prepack all linear layers for oneDNN. Mutates the module; returns how many were packed."""
        return pack_linears(self.module)

    def compile(self, kernels: Kernels, format: Format) -> int:
        """Give all linear layers to the compiled kernels, and all of the decoder where they can run it whole.

        Mutates the module; returns how many layers were packed. ``not_fused`` says why a decoder runs in parts.
        """
        packed = pack_native(self.module, kernels, format)
        try:
            self.fused = FusedDecoder(self.module, kernels)
        except NotFused as error:
            self.not_fused = str(error)
        return packed

    def refresh(self) -> None:
        """Weights were replaced. Mutates."""
        if self.fused is not None:
            self.fused.refresh()

    def _probe(self) -> list[LayerShape]:
        probe = Probe()
        with torch.inference_mode(), active(probe):
            positions = torch.arange(2, device=self.device)
            _, states = self.run_with_states(torch.zeros_like(positions), positions, positions[1:], positions)
        if states.shape == (2, self.module.get_output_embeddings().weight.shape[1]):
            self.hidden_size = int(states.shape[1])
        expected = self.config.get_text_config().num_hidden_layers
        if len(probe.layers) != expected:
            raise ModelError(
                f"{type(self.module).__name__}: {len(probe.layers)} of {expected} layers use transformers' attention "
                f"interface; only models whose every layer is standard attention can run on paged KV"
            )
        check_windows(self.config, probe.layers)
        return probe.layers


def load_model(source: ModelSource, dtype: torch.dtype, device: torch.device = CPU) -> LoadedModel:
    """Read a model's weights, to where it is to compute. Shows progress on a terminal's standard error.

    Raises:
        ModelError: unreadable, or not a decoder of standard attention layers.
    """
    register()
    load = _load_gguf if source.kind == "gguf" else _load_directory
    return load(source, dtype, device)


def _load_gguf(source: ModelSource, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    with GGUFFile(source.path) as file:
        values = gguf_llama.hf_config(file)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        check_config(config)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        state = {
            name: torch.from_numpy(array).to(device, dtype)
            for name, array in _progress(gguf_llama.weights(file), len(file.tensors), source.served_name)
        }
        eos_ids, fingerprint = gguf_llama.eos_ids(file), file.fingerprint()
    left = module.load_state_dict(state, strict=False, assign=True)
    module.tie_weights()
    if left.unexpected_keys:
        raise ModelError(f"{source.path.name}: tensors that the model has no place for: {left.unexpected_keys[:3]}")
    _materialise(module, config)
    return LoadedModel(module.to(device).eval().requires_grad_(False), eos_ids, fingerprint)


def _load_directory(source: ModelSource, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    try:
        config = AutoConfig.from_pretrained(source.path, local_files_only=True)
        check_config(config)
        with _quiet_transformers(), _spinner(source.served_name):
            module = AutoModelForCausalLM.from_pretrained(
                source.path, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"model {source.name!r}: transformers cannot load it: {error}") from error
    module = module.to(device).eval().requires_grad_(False)
    return LoadedModel(module, hf_dir.eos_ids(source.path), hf_dir.fingerprint(source.path))


def check_config(config: Any) -> None:
    """Refuse what a config tells of: not a decoder, chunks, other layers, RoPE that depends on the batch.

    Raises:
        ModelError: names the property.
    """
    text = config.get_text_config()
    name = getattr(config, "model_type", "model")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; only decoders run here")
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}; only full and sliding attention run here"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ModelError(f"{name}: RoPE of type {rope['rope_type']} depends on what else is in the batch")


def check_windows(config: Any, layers: Sequence[LayerShape]) -> None:
    """Every sliding window that the config tells of must have been handed to attention, layer by layer.

    Raises:
        ModelError: the model applies one by a mask of its own, which paged attention would not see.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = list(getattr(text, "layer_types", None) or ())
    if not kinds:
        slides = window is not None and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * len(layers)
    for shape, kind in zip(sorted(layers), kinds, strict=True):
        wanted = window if kind == "sliding_attention" else None
        if shape.window != wanted:
            raise ModelError(
                f"{config.model_type}: layer {shape.layer} ({kind}) should have a window of {wanted} tokens and has "
                f"{shape.window}: it is not one that paged attention computes"
            )


def _max_length(config: Any) -> int:
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 1:
            return value
    raise ModelError(f"{config.model_type}: the config does not say how long a sequence may be")


def _materialise(module: nn.Module, config: Any) -> None:
    """Build again, with real memory, the modules whose buffers are computed and not loaded (RoPE frequencies)."""
    for path, child in list(module.named_modules()):
        if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            module.set_submodule(path, type(child)(config))
    tensors: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        raise ModelError(f"the file has no weights for {', '.join(missing[:3])} ({len(missing)} are missing)")


def _progress(items: Iterable[Any], total: int, name: str) -> Iterator[Any]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task: TaskID = bar.add_task(f"loading {name}", total=total)
        for item in items:
            yield item
            bar.advance(task)


@contextmanager
def _spinner(name: str) -> Iterator[None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"loading {name}"):
        yield


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers draws bars on standard error even where that is a file."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def kv_bytes(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return sum(shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in layers) * int(dtype.itemsize)
