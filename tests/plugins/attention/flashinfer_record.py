"""What we call of FlashInfer, as a record: the signatures of one version, in JSON.

``python tests/plugins/attention/flashinfer_record.py > tests/data/flashinfer-VERSION.json`` makes it, where that
version is installed (it imports without a GPU).
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[2] / "data" / "flashinfer-0.7.4.json"
CALLED = {
    "BatchDecodeWithPagedKVCacheWrapper": ("__init__", "plan", "_plan_impl", "run"),  # plan hands its keywords on
    "BatchPrefillWithPagedKVCacheWrapper": ("__init__", "plan", "run"),
    "BatchAttention": ("__init__", "plan", "run"),
    "MultiLevelCascadeAttentionWrapper": ("__init__", "plan", "run"),
}
PLAIN = (str, int, float, bool, type(None))


def record(library: Any, version: str) -> dict[str, Any]:
    """The signatures of all that is called."""
    calls = {
        f"{name}.{method}": [_parameter(each) for each in _signature(library, name, method).parameters.values()]
        for name, methods in CALLED.items()
        for method in methods
    }
    return {"distribution": "flashinfer-python", "version": version, "calls": calls}


def signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    """A recorded signature, to bind calls with. A default that is no plain value is its text."""
    return inspect.Signature(
        [
            inspect.Parameter(
                each["name"], inspect._ParameterKind[each["kind"]], default=each.get("default", inspect.Parameter.empty)
            )
            for each in parameters
        ]
    )


def _signature(library: Any, name: str, method: str) -> inspect.Signature:
    return inspect.signature(getattr(getattr(library, name), method))


def _parameter(parameter: inspect.Parameter) -> dict[str, Any]:
    told: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not inspect.Parameter.empty:
        default = parameter.default
        told["default"] = default if isinstance(default, PLAIN) else str(default)
    return told


if __name__ == "__main__":
    import flashinfer

    made = record(flashinfer, flashinfer.__version__)
    lines = [
        f'    "{name}": [\n' + ",\n".join(f"      {json.dumps(each)}" for each in parameters) + "\n    ]"
        for name, parameters in made["calls"].items()
    ]
    print(f'{{\n  "distribution": "{made["distribution"]}",\n  "version": "{made["version"]}",\n  "calls": {{')
    print(",\n".join(lines))
    print("  }\n}")
