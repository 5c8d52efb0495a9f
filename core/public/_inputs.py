"""What ``LLM`` is given, in its many shapes, as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, InvalidRequest, suggest
from engine.core.request import SamplingParams

Prompt = str | Sequence[int]


def configure(model: str | None, config: EngineConfig | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """The effective configuration. Raises ``ConfigError`` naming the field at fault."""
    wishes = {**overrides, **({"model": model} if model is not None else {})}
    for name in wishes:
        if name not in EngineConfig.model_fields:
            raise ConfigError(f"unknown field {name!r}: {suggest(name, EngineConfig.model_fields)}")
    base = {name: getattr(config, name) for name in config.model_fields_set} if config is not None else {}
    try:
        return EngineConfig.model_validate({**base, **wishes})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many. A list of integers is one prompt; an empty list is no prompt at all.

    Raises:
        InvalidRequest: it is something else, such as an array.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"must be text or a list, not {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each prompt. Raises ``InvalidRequest`` where the numbers differ."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest("params", f"{len(params)} sampling params for {count} prompts")
    return list(params)
