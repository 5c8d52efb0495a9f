"""vLLM's scheduler and KV manager as a side of the comparison, driven as vLLM's engine core drives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _vllm_peer
from _sides import MAX_MODEL_LEN, PAGE_SIZE, Side, Sizes


class Vllm(Side):
    """``Scheduler``, or ``AsyncScheduler`` with overlap; statistics are off."""

    name = "vllm"

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        from vllm.sampling_params import SamplingParams
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        self._make_params, self._make_request, self._make_output = SamplingParams, Request, ModelRunnerOutput
        self._hasher = _vllm_peer.make_hasher(PAGE_SIZE)
        self._scheduler = _vllm_peer.make_scheduler(
            num_blocks=sizes.pages + 1,
            block_size=PAGE_SIZE,
            max_num_seqs=sizes.running,
            max_num_batched_tokens=sizes.budget,
            max_model_len=MAX_MODEL_LEN,
            asynchronous=sizes.overlap,
        )
        self._scheduler.use_v2_model_runner = True  # as on a GPU, where it is the default and the cheaper of the two
        self._preempted = 0
        preempt = self._scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._preempted += 1
            preempt(*args, **kwargs)

        self._scheduler._preempt_request = counted

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def decoding(self) -> bool:
        return not any(request.is_prefill_chunk for request in self._scheduler.running)

    @property
    def preemptions(self) -> int:
        return self._preempted

    def _params(self, max_tokens: int) -> Any:
        return self._make_params(max_tokens=max_tokens, ignore_eos=True)

    def _add(self, name: str, prompt: Sequence[int], params: Any) -> None:
        request = self._make_request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )
        self._scheduler.add_request(request)

    def _plan(self) -> Any:
        return self._scheduler.schedule()

    def _outcome(self, plan: Any, token: int) -> Any:
        requests = self._scheduler.requests
        names = list(plan.num_scheduled_tokens)
        return self._make_output(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[] if requests[name].is_prefill_chunk else [token] for name in names],
        )

    def _commit(self, plan: Any, outcome: Any) -> None:
        self._scheduler.update_from_output(plan, outcome)
