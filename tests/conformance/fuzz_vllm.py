"""Random workloads through the real vLLM scheduler and ours; prints the first step that is decided differently.

    python tests/conformance/fuzz_vllm.py --count 200 --seed 0 [--only sync|async] [--save DIR] [--shrink]
    python tests/conformance/fuzz_vllm.py --verify FILE...

Run by hand in an environment that has vLLM 0.27.1 beside this package. ``--verify`` records given workloads anew and
compares every field of their trace: it shows that what is recorded here is what was recorded there.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _vllm_recorder
import _vllm_shrink
import _vllm_workloads

from engine.core.replay import vllm
from engine.plugins.kvcache.paged import PagedCache

Workload = dict[str, Any]


class Verdict(NamedTuple):
    """What became of a workload, why, and the fields that differ (``raises`` where ours gave up).

    ``kind`` is ``equal``, ``differs``, ``stale`` or ``vllm-fails``. A ``stale`` one shows the one deliberate
    difference, and is equal without it: vLLM keeps pages matchable that a step gave to a request and, preempting it,
    does not compute. They hold what their last owner left in them; ours un-publishes them.
    """

    kind: str
    text: str = ""
    fields: frozenset[str] = frozenset()
    steps: int = 0
    ended: bool = True


def judge(workload: Workload) -> Verdict:
    """Record on vLLM, replay on ours. Mutates: the workload gets its ``trace``."""
    try:
        recording = _vllm_recorder.record(workload)
    except Exception:
        return Verdict("vllm-fails", traceback.format_exc(limit=-3))
    workload["trace"] = recording.trace
    try:
        report = vllm.replay(workload)
    except Exception:
        return Verdict("differs", traceback.format_exc(limit=-6), frozenset({"raises"}))
    found = report.divergence
    if found is None:
        return Verdict("equal", steps=report.steps, ended=recording.ended)
    if recording.stale_from is not None and recording.stale_from <= found.step:
        with mock.patch.object(PagedCache, "unpublish"):
            equal = vllm.replay(workload).equal
        if equal:
            return Verdict("stale", steps=len(recording.trace), ended=recording.ended)
    fields = frozenset(name for name, value in found.recorded.items() if found.decided[name] != value)
    return Verdict("differs", "\n".join(found.lines()), fields, report.steps, recording.ended)


def smallest(workload: Workload, verdict: Verdict) -> tuple[Workload, Verdict]:
    """A smaller workload whose first difference is in the same fields."""

    def shows(candidate: Workload) -> bool:
        if not candidate["requests"]:
            return False
        fitting = max(_vllm_workloads.pages_needed(candidate["config"], r) for r in candidate["requests"])
        if fitting > candidate["config"]["usable_blocks"]:
            return False
        found = judge(candidate)
        return found.kind == "differs" and found.fields == verdict.fields

    small = _vllm_shrink.shrink(workload, shows)
    return small, judge(small)


def summary(trace: list[dict[str, Any]]) -> dict[str, int]:
    """The figures that recordings carry."""
    return {
        "steps": len(trace),
        "preemptions": sum(len(step["preempted"]) for step in trace),
        "resumes": sum(len(step["resumed"]) for step in trace),
        "prefix_hit_tokens": sum(sum(step["cached_tokens"].values()) for step in trace),
        "finished": sum(len(step["finished"]) for step in trace),
        "aborted": sum(len(step.get("aborted", ())) for step in trace),
        "scheduled_tokens": sum(count for step in trace for _, count in step["scheduled"]),
        "min_free_blocks": min(step["free_blocks"] for step in trace),
    }


def dumps(workload: Mapping[str, Any]) -> str:
    """As recordings are written: a line for each request and each step."""
    data = {**workload, "summary": summary(workload["trace"])}
    order = ("name", "about", "source", "config", "summary", "requests", "actions", "trace")
    parts = []
    for name in (name for name in order if name in data):
        value = data[name]
        if name in ("requests", "trace"):
            text = "[\n" + ",\n".join(_flat(item) for item in value) + "\n]"
        else:
            text = _flat(value)
        parts.append(f"{_flat(name)}:{text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _flat(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def verify(files: list[Path]) -> bool:
    """Record the workloads of these files anew; prints each that differs from its trace."""
    equal = steps = 0
    for file in files:
        data = json.loads(file.read_text())
        trace = _vllm_recorder.record(data).trace
        pairs = enumerate(zip(data["trace"], trace, strict=False))
        different = next((number for number, (old, new) in pairs if old != new), None)
        if different is None and len(trace) == len(data["trace"]):
            equal += 1
            steps += len(trace)
            continue
        print(f"{file.name}: {len(data['trace'])} steps given, {len(trace)} recorded, first difference: {different}")
        if different is not None:
            print(f"  given    {_flat(data['trace'][different])}\n  recorded {_flat(trace[different])}")
    print(f"{equal} of {len(files)} recorded equal, {steps} steps, every field")
    return equal == len(files)


def fuzz(arguments: argparse.Namespace) -> bool:
    """Run the seeds; prints what differs and a tally."""
    tally: collections.Counter[str] = collections.Counter()
    met: collections.Counter[str] = collections.Counter()
    for workload in _workloads(arguments):
        verdict = judge(workload)
        tally[verdict.kind] += 1
        tally["steps"] += verdict.steps
        tally["endless"] += not verdict.ended
        if verdict.kind != "vllm-fails":
            met.update({name: int(value > 0) for name, value in summary(workload["trace"]).items()})
        if verdict.kind in ("differs", "vllm-fails"):
            print(f"{workload['name']}: {verdict.kind}\n{verdict.text}", flush=True)
        if verdict.kind == "differs" and arguments.shrink:
            workload, verdict = smallest(workload, verdict)
            print(f"smallest:\n{_flat(workload['config'])}")
            print("\n".join(_flat(request) for request in workload["requests"]))
            print(f"actions {_flat(workload.get('actions', []))}\n{verdict.text}", flush=True)
        if arguments.save and (verdict.kind == "differs" or arguments.save_all):
            arguments.save.mkdir(parents=True, exist_ok=True)
            (arguments.save / f"{workload['name']}.json").write_text(dumps(workload))
    print(", ".join(f"{name} {count}" for name, count in sorted(tally.items())))
    print("workloads with: " + ", ".join(f"{n} {met[n]}" for n in ("preemptions", "prefix_hit_tokens", "aborted")))
    return not tally["differs"]


def _workloads(arguments: argparse.Namespace) -> Iterator[Workload]:
    kinds = [kind for kind in ("sync", "async") if arguments.only in (None, kind)]
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        for kind in kinds:
            yield _vllm_workloads.generate(seed, asynchronous=kind == "async")


def main() -> None:
    """Parse, run; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="seeds to run")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", choices=("sync", "async"), help="one kind of scheduling (default: both)")
    parser.add_argument("--shrink", action="store_true", help="make what differs as small as possible")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write workloads that differ there, with vLLM's trace")
    parser.add_argument("--save-all", action="store_true", help="with --save: the equal ones too")
    parser.add_argument("--verify", type=Path, nargs="+", metavar="FILE", help="record given workloads anew instead")
    arguments = parser.parse_args()
    version = _vllm_recorder.peer.installed()
    if version != _vllm_recorder.peer.VERSION:
        parser.exit(2, f"vLLM {_vllm_recorder.peer.VERSION} is needed here; found {version}\n")
    same = verify(arguments.verify) if arguments.verify else fuzz(arguments)
    parser.exit(0 if same else 1)


if __name__ == "__main__":
    main()
