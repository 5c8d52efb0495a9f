"""Kit for plugin authors: drive an engine core by hand, with a model whose every token you choose.

Example::

    from engine.testing import ScriptedModel, make_core

    core = make_core(scheduler="radix", kvcache="paged", executor=ScriptedModel({"a": [7, 8]}), num_pages=8)
    core.add([1, 2, 3], SamplingParams(max_tokens=2), request_id="a")
    while core.has_work:
        core.step()
        core.check()
"""

from __future__ import annotations

from engine.testing.doubles import DoNothing
from engine.testing.executors import KVMismatch, ScriptedExecutor, ScriptedModel, ShadowExecutor, Witness
from engine.testing.making import make_core

__all__ = ["DoNothing", "KVMismatch", "ScriptedExecutor", "ScriptedModel", "ShadowExecutor", "Witness", "make_core"]
