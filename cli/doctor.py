"""``engine doctor``: is everything here that a server with this configuration needs?"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from engine.cli.doctor_attention import backends, layer_of, place
from engine.cli.findings import Finding
from engine.cli.flags import with_config
from engine.core.config import EngineConfig, LoadedConfig, parse_bytes
from engine.core.errors import EngineError, ModelError
from engine.core.native import cache_folder, find_compiler, instruction_set, why_not

NEEDED = (
    *("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "pydantic", "pluggy", "pyzmq", "msgspec"),
    *("fastapi", "uvicorn", "httpx", "prometheus-client", "typer", "rich"),
)
OPTIONAL = {
    "triton": "GPU kernels",
    "flashinfer-python": "GPU attention",
    "nixl": "KV transfer",
    "llguidance": "structured output and required tool calls: pip install 'sixhooks[grammar]'",
    "xgrammar": "structured output by --grammar xgrammar: pip install 'sixhooks[xgrammar]'",
    "uvloop": "faster HTTP",
}
OLDER_NAMES = {  # GPT-2 and its relatives
    "num_attention_heads": ("n_head", "num_heads"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@with_config()
def doctor(*, loaded: LoadedConfig) -> None:
    """Check versions, devices, plugins, model and page budget. Exit code 1 if something needed is missing."""
    config = loaded.config
    findings = [*packages(), *guarded("devices", devices), *plugins(loaded)]
    findings += guarded("attention", lambda: attention(config))
    findings += guarded("model", lambda: model(config))
    for finding in findings:
        mark = {"ok": "ok     ", "absent": "absent ", "missing": "MISSING"}[finding.status]
        typer.echo(f"{mark} {finding.name:<20} {finding.words}")
    missing = [finding.name for finding in findings if finding.status == "missing"]
    if missing:
        typer.echo(f"not ready: {', '.join(missing)}", err=True)
        raise typer.Exit(1)
    typer.echo("ready: engine serve")


def guarded(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check; what it raised is a finding too."""
    try:
        return list(check())
    except (EngineError, ImportError, OSError) as error:
        return [Finding("missing", name, str(error))]


def packages() -> Iterator[Finding]:
    """Versions, read from metadata: nothing is imported."""
    yield Finding("ok", "python", f"{platform.python_version()} ({platform.platform(terse=True)})")
    yield Finding("ok", "sixhooks", version("sixhooks"))
    for name in NEEDED:
        found = _version(name)
        yield Finding("ok", name, found) if found else Finding("missing", name, f"pip install {name}")
    for name, purpose in OPTIONAL.items():
        found = _version(name)
        yield Finding("ok", name, found) if found else Finding("absent", name, f"optional: {purpose}")


def devices() -> Iterator[Finding]:
    """What could compute."""
    yield Finding("ok", "cpu", f"{os.cpu_count()} cores, {platform.machine()}, {instruction_set()}")
    why = why_not()
    if why is None:
        yield Finding("ok", "cpu kernels", f"compiled by {find_compiler()}, kept in {cache_folder()}")
    else:
        yield Finding("absent", "cpu kernels", f"optional: faster on the CPU; {why}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("absent", "gpu", "none visible to torch")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"gpu {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def plugins(loaded: LoadedConfig) -> Iterator[Finding]:
    """Whether each selected plugin works, all of them together, and what else is installed and does not."""
    from engine.core.capabilities import problem, report
    from engine.core.effective import checked_options, selected
    from engine.core.handoff import check_role, with_role
    from engine.core.protocols import Attention, Connector, GrammarCompiler
    from engine.core.registry import Registry, build

    registry = Registry()
    wanted = list(selected(registry, loaded.config))
    made = []
    for one in wanted:
        try:
            found = registry.select(one.role, one.selection.name)
            checked_options(found, one, loaded.origins)
            made.append(build(found, with_role(one.selection, found.cls, loaded.config.role)))
            words = [f"{one.selection.name} ({found.origin})", *found.notes]
            if isinstance(made[-1], Attention):
                device, dtype = place(loaded.config)
                words.append(made[-1].prepare(device=device, dtype=dtype))
            made[-1].close()
            missing = made[-1].missing() if isinstance(made[-1], GrammarCompiler) else None
            yield Finding("absent" if missing else "ok", one.role, "; ".join([*words, *filter(None, [missing])]))
        except EngineError as error:
            yield Finding("missing", one.role, str(error))
    try:
        connectors = [type(plugin) for plugin in made if isinstance(plugin, Connector)]
        check_role(loaded.config.role, connectors, registry, loaded.origins.get("role", "default"))
    except EngineError as error:
        yield Finding("missing", "role", str(error))
    summary = report(made, registry)
    if len(made) == len(wanted):
        yield from (
            Finding("missing", "capabilities", words) for words in [*map(problem, summary.missing), *summary.false]
        )
    yield from (Finding("absent", "downgrade", words) for words in summary.downgrades)
    for line in registry.listing():
        if line.status != "ok":
            yield Finding("absent", line.role, f"{line.name} of {line.distribution} does not work: {line.cause}")


def attention(config: EngineConfig) -> Iterator[Finding]:
    """Which of the installed backends could compute the model, where the executor wants one."""
    from engine.core.models.source import resolve
    from engine.core.registry import Registry

    try:
        executor = Registry().select("executor", config.executor.name).cls
    except EngineError:
        return  # the executor's line says why, and so it does of a bad type
    if not getattr(executor, "uses_attention", False) or place(config)[1] not in ITEM_BYTES:
        return
    kv_dtype = "float8_e4m3fn" if config.executor.options.get("kv_dtype") == "fp8" else ""
    try:
        source = resolve(config.model)
        layer = layer_of(read_config(source.kind, source.path), kv_dtype)
    except EngineError:
        layer = None  # the model's line says why
    yield from backends(config, layer)


def model(config: EngineConfig) -> Iterator[Finding]:
    """Where the model is, and how many tokens of KV fit into the configured memory."""
    if config.executor.name == "sim":
        yield Finding("ok", "model", "simulated: no files needed")
        return
    from engine.core.models.source import resolve

    source = resolve(config.model)
    yield Finding("ok", "model", f"{source.served_name} ({source.kind}, {source.path})")
    item = ITEM_BYTES.get(str(config.executor.options.get("dtype", "float32")))
    if item is None:
        return  # the executor's line says so
    shape = read_config(source.kind, source.path)
    token_bytes = kv_bytes_per_token(shape, item)
    pages = config.num_pages or parse_bytes(config.kv_memory) // (token_bytes * config.page_size)
    words = (
        f"{pages} pages x {config.page_size} tokens = {pages * config.page_size} tokens ({token_bytes} bytes a token)"
    )
    length = config.max_model_len or number(shape, "max_position_embeddings", default=0)
    if pages * config.page_size < 2:
        yield Finding("missing", "KV pages", f"{words}: raise kv_memory or num_pages")
    elif pages * config.page_size < length:
        yield Finding("ok", "KV pages", f"{words}; less than one request of {length} tokens: raise kv_memory")
    else:
        yield Finding("ok", "KV pages", words)


def kv_bytes_per_token(shape: Mapping[str, Any], item: int) -> int:
    """Keys and values of one token in all layers. Raises ``ModelError`` where the model's shape is not given."""
    heads = number(shape, "num_attention_heads")
    kv_heads = number(shape, "num_key_value_heads", default=heads)
    head_dim = number(shape, "head_dim", default=0) or number(shape, "hidden_size") // heads
    return 2 * number(shape, "num_hidden_layers") * kv_heads * head_dim * item


def number(shape: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive number of a model's ``config.json``, also under its older name. Raises ``ModelError``."""
    for key in (name, *OLDER_NAMES.get(name, ())):
        value = shape.get(key)
        if isinstance(value, int) and value > 0:
            return value
    if default is None:
        raise ModelError(f"the model's config.json has no usable {name}: the KV pool cannot be sized from it")
    return default


def read_config(kind: str, path: Any) -> dict[str, Any]:
    """The model's shape under the names that Hugging Face uses. Raises ``ModelError``."""
    if kind == "gguf":
        from engine.core.models.gguf_file import GGUFFile
        from engine.core.models.gguf_llama import hf_config

        return hf_config(GGUFFile(path))
    from engine.core.models.hf_dir import read_json

    return read_json(path / "config.json")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
