"""Configuration: defaults < TOML file < environment < flags, every value with its origin, unknown keys refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from engine.core.errors import ConfigError, suggest

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
ENV_PREFIX = "ENGINE_"
NEAR_MISS = 0.8  # how alike a foreign variable and a key must be to count as a misspelling
KEY = re.compile(r"[\x21-\x7e]+")
SECRETS = frozenset({"api_key"})


class Selection(BaseModel):
    """Which plugin plays a role, and its options: ``"radix"``, or a table with ``name`` and the plugin's options."""

    model_config = ConfigDict(frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


def _selection(value: Any) -> Any:
    if isinstance(value, str):
        return Selection(name=value)
    if isinstance(value, Mapping):
        if not isinstance(value.get("name"), str):
            raise ValueError("a table needs a 'name' that selects the plugin")
        return Selection(name=value["name"], options={k: v for k, v in value.items() if k != "name"})
    return value


def _selections(value: Any) -> Any:
    if isinstance(value, str):
        value = [name for name in value.split(",") if name]
    return [_selection(item) for item in value] if isinstance(value, Sequence) else value


Selected = Annotated[Selection, BeforeValidator(_selection)]
SelectedMany = Annotated[tuple[Selection, ...], BeforeValidator(_selections)]


class EngineConfig(BaseModel):
    """Everything that shapes an engine. Roles take a plugin's name, ``pkg.module:Class``, or a table with options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(DEFAULT_MODEL, description="model name, HF directory, GGUF file or hub id")
    scheduler: Selected = Field(Selection(name="unified"), description="who runs when")
    kvcache: Selected = Field(Selection(name="paged"), description="how cached prefixes are indexed")
    executor: Selected = Field(Selection(name="torch"), description="what computes the steps")
    attention: Selected = Field(Selection(name="torch"), description="attention backend of the executor")
    frontend: Selected = Field(Selection(name="openai"), description="what serves people")
    policies: SelectedMany = Field((), description="small plugins that answer one hook; the first is asked first")
    connectors: SelectedMany = Field((), description="what moves KV to other engines and tiers")
    page_size: int = Field(16, ge=1, le=1024, description="tokens a KV page")
    num_pages: int | None = Field(None, ge=1, description="KV pages in the pool (default: sized from kv_memory)")
    kv_memory: str = Field("1GiB", description="memory for the KV pool, e.g. 512MiB, when num_pages is not given")
    max_model_len: int | None = Field(None, ge=2, description="most tokens of one request (default: the model's)")
    max_batch_tokens: int = Field(2048, ge=1, description="most tokens computed in one step")
    max_running: int = Field(64, ge=1, description="most requests that hold KV pages at once")
    max_waiting: int = Field(2048, ge=1, description="most requests in the queue; more are refused")
    overlap: bool = Field(False, description="plan the next step while one is computed, if the executor can")
    seed: int = Field(0, description="seed of all drawn seeds")
    heartbeat_timeout: float = Field(5.0, gt=0, description="seconds without a sign of life: the engine is dead")
    step_timeout: float = Field(120.0, gt=0, description="seconds without a finished step: the engine is stuck")
    ask_seconds: float = Field(0.5, gt=0, description="seconds that one ask of a policy may take; more is a fault")
    audit: bool = Field(False, description="full invariant check after every step (slow)")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on (0: any free one)")
    api_key: str | None = Field(None, description="bearer token that clients must send")

    @field_validator("api_key")
    @classmethod
    def _usable_key(cls, value: str | None) -> str | None:
        """An empty key would protect nothing, and one that no header can carry would lock everybody out."""
        if value is not None and not value.strip():
            raise ValueError("is empty: leave it out for an open server")
        if value is not None and not KEY.fullmatch(value):
            raise ValueError("must be printable ASCII without spaces: it travels in a header")
        return value

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values, secrets hidden."""
        data = self.model_dump()
        if data["api_key"]:
            data["api_key"] = "***"
        return data


@dataclass(frozen=True)
class LoadedConfig:
    """An effective configuration and where each value came from (``default``, a file, a variable, a flag)."""

    config: EngineConfig
    origins: Mapping[str, str] = field(default_factory=dict)


ROLE_KEYS = ("scheduler", "kvcache", "executor", "attention", "frontend")
MANY_KEYS = ("policies", "connectors")


def load_config(
    *,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Build the effective configuration. Later sources win, key by key, plugin options included.

    Args:
        file: a TOML file with the fields of ``EngineConfig``; a role is a string or a table.
        env: variables such as ``ENGINE_SCHEDULER=radix`` or ``ENGINE_SCHEDULER__CHUNKED_PREFILL_SIZE=512``. Others
            may share the prefix: a name that is no key is left alone, unless it looks like a misspelt one.
        flags: dotted names, e.g. ``{"scheduler": "radix", "scheduler.chunked_prefill_size": "512"}``; ``None`` values
            are ignored.

    Raises:
        ConfigError: names the key, where it came from, and the nearest known one.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        _merge(tree, origins, _flatten(_read_toml(Path(file))), f"file {file}")
    for key, value in (env or {}).items():
        if key.startswith(ENV_PREFIX):
            dotted = key[len(ENV_PREFIX) :].lower().replace("__", ".")
            if _is_foreign(dotted):
                continue
            _merge(tree, origins, {dotted: value}, f"environment {key}")
    for key, value in (flags or {}).items():
        if value is not None:
            _merge(tree, origins, {key: value}, f"flag --{key.replace('_', '-')}")
    return LoadedConfig(config=_validated(tree, origins), origins=origins)


def _is_foreign(dotted: str) -> bool:
    """Whether a variable is somebody else's: neither a key nor nearly one."""
    name, known = dotted.partition(".")[0], EngineConfig.model_fields
    return name not in known and not get_close_matches(name, known, n=1, cutoff=NEAR_MISS)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error


def _flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            for inner, inner_value in value.items():
                flat[key if inner == "name" else f"{key}.{inner}"] = inner_value
        else:
            flat[key] = value
    return flat


def _merge(tree: dict[str, Any], origins: dict[str, str], values: Mapping[str, Any], origin: str) -> None:
    """Put dotted ``values`` into ``tree``, a nested table per role; a new plugin drops the old one's options."""
    for key, value in values.items():
        role, _, option = key.partition(".")
        if role not in EngineConfig.model_fields:
            raise ConfigError(f"unknown key {key!r} ({origin}): {suggest(role, EngineConfig.model_fields)}")
        origins[key] = origin
        if role not in ROLE_KEYS:
            if option:
                raise ConfigError(f"{key!r} ({origin}): {role} has no options")
            tree[role] = value
        elif option:
            entry = tree.setdefault(role, {"name": EngineConfig.model_fields[role].default.name})
            entry[option.replace("-", "_")] = value
        elif isinstance(value, str):
            old = tree.get(role, {})
            tree[role] = {**old, "name": value} if old.get("name", value) == value else {"name": value}
        else:
            raise ConfigError(f"{key} ({origin}): must be a plugin's name, not {value!r}")


def _validated(tree: Mapping[str, Any], origins: Mapping[str, str]) -> EngineConfig:
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        got = "" if key in SECRETS else f", got {first['input']!r}"
        words = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key} ({origins.get(key, 'default')}): {words}{got}") from (
            None if key in SECRETS else error
        )


def parse_bytes(text: str) -> int:
    """Bytes of ``512MiB``, ``2GB``, ``1.5 GiB`` or a plain number. Raises ``ConfigError``."""
    units = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    cleaned = text.strip().lower()
    digits = cleaned.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = cleaned[len(digits) :].strip()
    decimal = len(unit) == 2 and unit.endswith("b")
    base = unit[:1]
    try:
        if unit not in {"", "b"} and unit not in {base, base + "b", base + "ib"}:
            raise ValueError
        scale = 1000 ** ("kmgt".index(base) + 1) if decimal and base in "kmgt" else units[base]
        size = int(float(digits) * scale)
        if size <= 0:
            raise ValueError
    except (ValueError, KeyError) as error:
        raise ConfigError(f"kv_memory: {text!r} is not a size such as 512MiB or 2GB") from error
    return size
