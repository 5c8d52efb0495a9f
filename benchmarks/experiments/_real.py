"""The sides on the default model, on this machine's CPU, in an open loop."""

from __future__ import annotations

import gc
import platform
from typing import Any

import torch
from _kit import ENDLESS, Case, Figures, Side, figures

from engine import LLM
from engine.lab import Results, measure

WARM = 4  # requests before the first that counts: memory is touched, kernels are compiled


class Machine:
    """Runs sides, and remembers what they ran on. Options of the modelled executor are left out: it is not there."""

    def __init__(self) -> None:
        self._requests = 0
        self._model = ""

    def run(self, case: Case, side: Side, seed: int) -> Figures:
        """Figures of one run, of an engine of its own."""
        given: dict[str, Any] = {**ENDLESS, **case.config, **side.config}
        given.pop("executor", None)
        if (tokens := given.pop("kv_tokens", None)) is not None:
            given["num_pages"] = tokens // given["page_size"]
        results = self._measured(given, case, seed)
        self._requests = len(results.requests)
        return figures(results, case.slo)

    def _measured(self, given: dict[str, Any], case: Case, seed: int) -> Results:
        llm = LLM(**given)
        try:
            self._model = llm.core.model.name
            return measure(llm, case.make(seed, 1.0), warm_up=WARM)
        finally:
            llm.close()
            gc.collect()

    def about(self) -> dict[str, Any]:
        """On what."""
        device = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
        return {"model": self._model, "device": device, "requests": self._requests}
