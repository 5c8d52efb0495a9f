"""A Hugging Face model directory, as far as it can be read without torch: JSON files, end tokens, fingerprint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises ``ModelError`` when it cannot be read."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def token_text(value: Any) -> str | None:
    """The text of a token as ``tokenizer_config.json`` gives it: plain, or an object with ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def eos_ids(path: Path) -> frozenset[int]:
    """Token ids that end a generation: of ``generation_config.json``, ``config.json`` and the tokenizer together.

    The tokenizer's counts because chat models are often trained to end a turn with it while their config still names
    the base model's end token.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(path / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    settings = read_json(path / "tokenizer_config.json")
    text = token_text(settings.get("eos_token"))
    number = None if text is None else _token_id(path, settings, text)
    return frozenset(found if number is None else found | {number})


def _token_id(path: Path, settings: dict[str, Any], text: str) -> int | None:
    for number, token in settings.get("added_tokens_decoder", {}).items():
        if token_text(token) == text:
            return int(number)
    listed = read_json(path / "tokenizer.json")
    for token in listed.get("added_tokens", ()):
        if token.get("content") == text:
            return int(token["id"])
    vocab = listed.get("model", {}).get("vocab")
    number = vocab.get(text) if isinstance(vocab, dict) else None
    return number if isinstance(number, int) else None


def chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: ``chat_template.jinja``, else that of ``tokenizer_config.json`` (the one named default)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def fingerprint(path: Path) -> str:
    """Hex digest of the model's content, cheap (milliseconds): what differs in weights differs here, in practice.

    SHA-256 over ``config.json`` and, for every weight file in order of name: its name, size, first 64 KiB (a
    safetensors file's header) and 64 evenly spread samples of 4 KiB. It is no proof against a forger.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"{len(file.name)}:{file.name}:{size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 16))
            for sample in range(_SAMPLES):
                handle.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()
