"""Fixtures of the model files' tests: the default model's source, and a small tokenizer built by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.core.errors import ModelError
from engine.core.models.source import ModelSource, resolve
from engine.core.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def default_source() -> ModelSource:
    try:
        return resolve("default")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm(default_source: ModelSource) -> Tokenizer:
    return load_tokenizer(default_source)


@pytest.fixture(scope="session")
def letters() -> dict[str, int]:
    """GPT-2's letter for each byte."""
    return byte_letters()


@pytest.fixture
def backend() -> tokenizers.Tokenizer:
    return byte_tokenizer()


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte (ids 0 … 255 in byte order), some merges over them, and two marks."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = [("a", "b"), ("ab", "c"), (letters[0xF0], letters[0x9F]), (letters[0xE2], letters[0x82])]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    return backend


def byte_letters() -> dict[str, int]:
    """Printable bytes stand for themselves, the rest are the characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


@pytest.fixture(scope="session")
def bytewise() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture
def hf_directory(tmp_path: Path) -> Path:
    """A directory with a tokenizer and configs, but no weights."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "add_bos_token": True,
        "chat_template": template,
    }
    write_json(tmp_path / "tokenizer_config.json", settings)
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 7})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [7, 8]})
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
