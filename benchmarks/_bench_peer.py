"""vLLM's load client, run by vLLM's Python for ``bench_agrees.py``: a job a line on standard input, figures on output.

A job is JSON: ``url``, ``model``, and ``requests`` of ``[seconds, token ids, tokens wanted]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

NONE_ASKED = object()  # a tokenizer that counts nothing: the server's usage does; without one only half is reported


def main() -> None:
    """Say ``ready``, then answer jobs until there are no more."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # it prints its own tables
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    out.write('"ready"\n')
    for line in sys.stdin:
        job = json.loads(line)
        requests = [
            SampleRequest(prompt=ids, prompt_len=len(ids), expected_output_len=output, timestamp=at)
            for at, ids, output in job["requests"]
        ]
        found = asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION, endpoint_type="openai", api_url=f"{job['url']}/v1/completions",
                base_url=job["url"], model_id=job["model"], model_name=job["model"], tokenizer=NONE_ASKED,
                input_requests=requests, logprobs=None, request_rate=float("inf"), burstiness=1.0, disable_tqdm=True,
                num_warmups=0, profile=False, selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
                selected_percentiles=[99.0], ignore_eos=True, goodput_config_dict={}, max_concurrency=None,
                lora_modules=None, extra_headers=None, extra_body={"temperature": 0.0}, ready_check_timeout_sec=0,
                self_timed=True,
            )
        )  # fmt: skip
        out.write(json.dumps({key: value for key, value in found.items() if isinstance(value, int | float)}) + "\n")


if __name__ == "__main__":
    main()
