"""Configuration: defaults < TOML file < environment < flags, every value with its origin, unknown keys refused."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from engine.core.errors import ConfigError
from engine.core.layers import Layers, One, Said
from engine.core.values import from_text

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
ENV_PREFIX = "ENGINE_"
NEAR_MISS = 0.8  # how alike a foreign variable and a key must be to count as a misspelling
KEY = re.compile(r"[\x21-\x7e]+")
SECRETS = frozenset({"api_key"})
REPEATED = frozenset({"api_key", "cors_origin"})  # flags that may be given several times


def _a_size(value: str) -> str:
    try:
        parse_bytes(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


Size = Annotated[str, AfterValidator(_a_size)]
"""Bytes as people write them, e.g. ``512MiB``: what ``parse_bytes`` understands."""


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
    if isinstance(value, Mapping):
        value = [{**options, "name": name} for name, options in value.items()]
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
    attention: Selected = Field(Selection(name="auto"), description="attention backend of the executor")
    grammar: Selected = Field(Selection(name="llguidance"), description="what compiles grammars (structured output)")
    frontend: Selected = Field(Selection(name="openai"), description="what serves people")
    tool_parser: Selected = Field(Selection(name="hermes"), description="how the model writes tool calls")
    policies: SelectedMany = Field((), description="small plugins that answer one hook; the first is asked first")
    connectors: SelectedMany = Field((), description="what moves KV to other engines and tiers")
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="its part in a hand-off: compute prompts, go on with those of others, or both"
    )
    page_size: int = Field(16, ge=1, le=1024, description="tokens a KV page")
    num_pages: int | None = Field(None, ge=1, description="KV pages in the pool (default: sized from kv_memory)")
    kv_memory: Size = Field(
        "1GiB",
        description="memory for the KV pool, e.g. 512MiB, when num_pages is not given; no more than the machine has",
    )
    max_model_len: int | None = Field(None, ge=2, description="most tokens of one request (default: the model's)")
    max_batch_tokens: int | None = Field(
        None, ge=1, description="most tokens computed in one step (default: 2048, or what the executor thinks best)"
    )
    max_running: int = Field(64, ge=1, description="most requests that hold KV pages at once")
    max_waiting: int = Field(2048, ge=1, description="most requests in the queue; more are refused")
    max_waiting_tokens: int = Field(2**20, ge=1, description="most prompt tokens of requests that have not begun")
    queue_timeout: float | None = Field(None, gt=0, description="seconds a request waits to begin (default: no limit)")
    max_n: int = Field(128, ge=1, description="most choices of one prompt")
    max_logprobs: int = Field(20, ge=0, description="most rivals of a token whose log-probabilities are reported")
    max_prompt_logprobs: int = Field(65536, ge=0, description="most log-probabilities reported of one prompt")
    max_output_logprobs: int = Field(2**20, ge=0, description="most log-probabilities of one request's output")
    max_stop_strings: int = Field(16, ge=0, description="most stop strings of one request")
    max_stop_length: int = Field(1024, ge=1, description="most characters of a stop string")
    max_stop_token_ids: int = Field(128, ge=0, description="most stop tokens of one request")
    max_logit_bias: int = Field(1024, ge=0, description="most entries of a logit_bias")
    max_grammar_bytes: int = Field(65536, ge=1, description="longest grammar or JSON schema of a request")
    grammar_seconds: float = Field(5.0, gt=0, description="seconds that compiling a grammar may take")
    grammar_threads: int = Field(2, ge=1, description="threads that compile grammars")
    overlap: bool = Field(False, description="plan the next step while one is computed, if the executor can")
    seed: int = Field(0, description="seed of all drawn seeds")
    heartbeat_timeout: float = Field(5.0, gt=0, description="seconds without a sign of life: the engine is dead")
    step_timeout: float = Field(120.0, gt=0, description="seconds without a finished step: the engine is stuck")
    ask_seconds: float = Field(0.5, gt=0, description="seconds that one ask of a policy may take; more is a fault")
    cache_events: str = Field(
        "off", description="tell what is cached: off, on (over HTTP), or where to publish it too, e.g. tcp://HOST:PORT"
    )
    cache_events_replay: str | None = Field(
        None, description="where subscribers ask for missed events (default: the port after that of cache_events)"
    )
    cache_events_topic: str = Field("cache", description="first frame of published cache events: names the engine")
    cache_events_tokens: bool = Field(False, description="cache events tell token ids, salt and adapter (private!)")
    cache_events_history: int = Field(65_536, ge=1, description="cache events kept for those that missed some")
    record: bool = Field(False, description="record decisions, in memory (engine explain, engine record)")
    record_mb: int = Field(16, ge=1, description="memory for recorded decisions, in MiB; the oldest are forgotten")
    record_dir: str | None = Field(None, description="folder for decision logs, written as decisions are made")
    record_file_mb: int = Field(64, ge=1, description="MiB of a decision log's file after which the next begins")
    record_files: int = Field(16, ge=1, description="files of a decision log that are kept; the oldest are removed")
    audit: bool = Field(False, description="full invariant check after every step (slow)")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on (0: any free one)")
    api_key: tuple[str, ...] = Field((), description="bearer token that clients must send, one of several")
    api_key_file: str | None = Field(None, description="file of bearer tokens, one a line, 'label: token' or 'token'")
    cors_origin: tuple[str, ...] = Field((), description="web pages of other origins that may ask, e.g. https://a.org")
    progress_timeout: float = Field(15.0, gt=0, description="seconds without progress: the server is not ready")
    drain_timeout: float = Field(20.0, ge=0, description="seconds that open requests have to end after SIGTERM")
    log_requests: bool = Field(False, description="log one line for each HTTP request when it has ended")
    log_prompts: bool = Field(False, description="log prompts (private!)")
    otel: str | None = Field(None, description="where traces go, e.g. http://HOST:4318/v1/traces (OpenTelemetry)")

    @field_validator("*", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        """Text of a flag or a variable. A key that says ``none`` is a key: it must not open a server by accident."""
        name = info.field_name or ""
        plain = isinstance(value, str) and name not in {*SECRETS, *ROLE_KEYS, *SINGULAR}
        return from_text(value, cls.model_fields[name].annotation) if plain else value

    @field_validator("cache_events")
    @classmethod
    def _a_place(cls, value: str) -> str:
        return value if value in ("off", "on") else _endpoint(value)

    @field_validator("cache_events_replay")
    @classmethod
    def _another_place(cls, value: str | None) -> str | None:
        return None if value is None else _endpoint(value)

    @field_validator("api_key", mode="before")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        return () if value is None else (value,) if isinstance(value, str) else value

    @field_validator("api_key")
    @classmethod
    def _usable_keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """An empty key would protect nothing, and one that no header can carry would lock everybody out."""
        if any(not key.strip() for key in value):
            raise ValueError("is empty: leave it out for an open server")
        if any(not KEY.fullmatch(key) for key in value):
            raise ValueError("must be printable ASCII without spaces: it travels in a header")
        if len(set(value)) < len(value):
            raise ValueError("is given twice")
        return value

    @field_validator("cors_origin", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Given several times, or once as a list."""
        parts = [part for text in value for part in str(text).split(",")] if isinstance(value, list | tuple) else value
        return [part.strip() for part in parts if part.strip()] if isinstance(parts, list) else parts

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"https?://[^\s/?#,]+", origin):
                raise ValueError(f"{origin!r} is no origin such as https://example.org, without a path")
        return value

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values, secrets hidden."""
        data = self.model_dump()
        data["api_key"] = "***" if data["api_key"] else None
        return data


def _endpoint(value: str) -> str:
    if not re.fullmatch(r"tcp://\S+:[1-9]\d{0,4}|ipc://\S+", value):
        raise ValueError("is no endpoint such as tcp://127.0.0.1:5557 or ipc:///run/engine/cache")
    return value


@dataclass(frozen=True)
class LoadedConfig:
    """An effective configuration and where each value came from.

    Attributes:
        config: the configuration; options of plugins are as they were written, checked when the plugin is known.
        origins: dotted key (``port``, ``scheduler.policy``, ``policies.fair-share.quantum``) -> ``file PATH``,
            ``environment NAME`` or ``flag --NAME``. Keys that are not in it have their defaults.
    """

    config: EngineConfig
    origins: Mapping[str, str] = field(default_factory=dict)


ROLE_KEYS = ("scheduler", "kvcache", "executor", "attention", "grammar", "frontend", "tool_parser")
SINGULAR = {"policies": "policy", "connectors": "connector"}
MANY_KEYS = tuple(SINGULAR)


def load_config(
    *,
    file: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Build the effective configuration. Later sources win, key by key, plugin options included.

    Args:
        file: a TOML file with the fields of ``EngineConfig``; a role is a string or a table.
        env: variables such as ``ENGINE_SCHEDULER=radix``, ``ENGINE_SCHEDULER__CHUNKED_PREFILL_SIZE=512`` or
            ``ENGINE_POLICIES__FAIR_SHARE__QUANTUM=512``. Others may share the prefix: a name that is no key is left
            alone, unless it looks like a misspelt one.
        flags: dotted names, e.g. ``{"scheduler": "radix", "scheduler.chunked_prefill_size": "512"}``; ``None`` values
            are ignored.

    Raises:
        ConfigError: names the key, where it came from, and the nearest known one.
    """
    layers = Layers(EngineConfig.model_fields, ROLE_KEYS, SINGULAR)
    if file is not None:
        layers.add([(key, value, f"file {file}") for key, value in _read_toml(Path(file)).items()])
    layers.add(_of_environment(env or {}))
    layers.add([(key, value, f"flag {flag_of(key)}") for key, value in (flags or {}).items() if value is not None])
    return _validated(layers)


def flag_of(key: str) -> str:
    """The flag of a dotted key: ``--scheduler.chunked-prefill-size``, ``--policy.fair-share.quantum``."""
    name, *path = key.split(".")
    words = [SINGULAR.get(name, name).replace("_", "-"), *path[:-1], *(part.replace("_", "-") for part in path[-1:])]
    return "--" + ".".join(words)


def variable_of(key: str) -> str:
    """The variable of a dotted key: ``ENGINE_SCHEDULER__CHUNKED_PREFILL_SIZE``."""
    name, _, path = key.partition(".")
    inner, _, option = path.rpartition(".")
    parts = [part for part in (name, inner, option) if part]
    return ENV_PREFIX + "__".join(re.sub(r"[^a-z0-9]+", "_", part.lower()).upper() for part in parts)


def _of_environment(env: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = []
    for key, value in env.items():
        dotted = key[len(ENV_PREFIX) :].lower().replace("__", ".")
        if key.startswith(ENV_PREFIX) and not _is_foreign(dotted):
            found.append((dotted, value, f"environment {key}"))
    return found


def _is_foreign(dotted: str) -> bool:
    """Whether a variable is somebody else's: neither a key nor nearly one."""
    name, known = dotted.partition(".")[0], [*EngineConfig.model_fields, *SINGULAR.values()]
    return name not in known and not get_close_matches(name, known, n=1, cutoff=NEAR_MISS)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error


def _validated(layers: Layers) -> LoadedConfig:
    values: dict[str, Any] = {key: said.value for key, said in layers.values.items()}
    origins = {key: said.origin for key, said in layers.values.items()}
    for name, role in layers.roles.items():
        if role.chosen is not None:
            origins[name] = role.chosen.origin
        if isinstance(role, One):
            if role.chosen is not None or role.options:
                chosen = role.chosen.value if role.chosen is not None else EngineConfig.model_fields[name].default.name
                values[name] = Selection(name=chosen, options=_values(role.options))
                origins |= {f"{name}.{option}": said.origin for option, said in role.options.items()}
            continue
        role.check()
        if role.chosen is not None:
            values[name] = [Selection(name=pick.name, options=_values(pick.options)) for pick in role.picks]
        for key, pick in zip(keys_of(name, [pick.name for pick in role.picks]), role.picks, strict=True):
            origins |= {f"{key}.{option}": said.origin for option, said in pick.options.items()}
    return LoadedConfig(config=_checked(values, origins), origins=origins)


def _values(options: Mapping[str, Said]) -> dict[str, Any]:
    return {option: said.value for option, said in options.items()}


def keys_of(role: str, names: Sequence[str]) -> list[str]:
    """The dotted key of each selected plugin of a role: ``policies.NAME``, from the second of a name on with ``#2``."""
    seen: Counter[str] = Counter()
    keys = []
    for name in names:
        seen[name] += 1
        keys.append(f"{role}.{name}" + (f"#{seen[name]}" if seen[name] > 1 else ""))
    return keys


def _checked(values: Mapping[str, Any], origins: Mapping[str, str]) -> EngineConfig:
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        secret = str(first["loc"][0]) in SECRETS
        got = "" if secret else f", got {first['input']!r}"
        words = first["msg"].removeprefix("Value error, ")
        origin = origins.get(key, origins.get(str(first["loc"][0]), "default"))
        raise ConfigError(f"{key} ({origin}): {words}{got}") from (None if secret else error)


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
        raise ConfigError(f"{text!r} is not a size such as 512MiB or 2GB") from error
    return size
