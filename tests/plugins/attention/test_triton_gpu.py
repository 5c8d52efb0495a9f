"""Backend ``triton`` on a GPU, where there is one: the rules of its role, and a captured graph."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from engine.core import AttentionLayer, Context, Limits, ModelInfo
from engine.core.pages import PagePool
from engine.testing import AttentionSuite
from engine.testing.paged import PagedMemory, Row, Shape

if find_spec("triton") is None or not torch.cuda.is_available():
    pytest.skip("there is no GPU, or no triton", allow_module_level=True)


class TestTritonOnAGPU(AttentionSuite):
    """Not interpreted, and with all shapes."""

    plugin = "triton"
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")
    head_dims = (16, 64, 128)

    def test_a_captured_graph_computes_what_was_planned_last(self) -> None:
        backend, rows = self.make(), 4
        backend.prepare(device="cuda", dtype="float16")
        backend.expect([AttentionLayer(heads=6, kv_heads=2, k_dim=64, v_dim=64, scale=0.3)])
        limits = Limits(max_model_len=9000, max_batch_tokens=64, max_running=4, page_size=5, num_pages=9, vocab_size=9)
        model = ModelInfo(name="", vocab_size=9, max_model_len=9000)
        backend.start(Context(limits=limits, pool=PagePool(9, 5), model=model))
        shape = Shape(heads=6, kv_heads=2, head_dim=64, page_size=5, dtype="float16", device="cuda")
        memories = [
            PagedMemory(shape, [Row(length, 1) for length in lengths], seed=seed)
            for seed, lengths in enumerate(([8999, 0, 3, 70], [1, 2, 3, 4], [7000, 5000, 1, 300]))
        ]
        pages = max(len(memory.k_pages) for memory in memories)
        k_pages, v_pages = (torch.full((pages, 5, 2, 64), torch.nan).half().cuda() for _ in range(2))
        query, keys, values = (torch.zeros(rows, heads, 64).half().cuda() for heads in (6, 2, 2))

        def layer() -> torch.Tensor:
            backend.write(keys, values, k_pages, v_pages)
            answer: torch.Tensor = backend.attend(query, k_pages, v_pages, 0.3)
            return answer

        graph, answer = torch.cuda.CUDAGraph(), None
        for memory in memories:
            for kept, new in ((query, memory.query), (keys, memory.keys), (values, memory.values)):
                kept.copy_(new)
            for kept, new in ((k_pages, memory.k_pages), (v_pages, memory.v_pages)):
                kept[: len(new)] = new
            backend.plan_graph(memory.batch)
            if answer is None:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    layer()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph):
                    answer = layer()
            graph.replay()
            torch.testing.assert_close(answer.double(), memory.expected(0.3), atol=4e-3, rtol=4e-3)
