"""transformers' own continuous batching.

Options: `dtype`, `attn_implementation`, `sort` (add the requests in the order of their tokens, as
its `add_requests` does, so that a common prefix is shared), and `continuous_batching_config`.
"""

from __future__ import annotations

from typing import Any

import torch
from job import Job, Request, perform
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

OPTIONS = {
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "sort": True,
    "continuous_batching_config": {},
}
NO_END = -1


class Loaded:
    """A loaded model and its settings; each call of `generate` has a manager of its own."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._is_sorted: bool = job.options["sort"]
        self._settings: dict[str, Any] = job.options["continuous_batching_config"]
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            job.model,
            dtype=getattr(torch, job.options["dtype"]),
            attn_implementation=job.options["attn_implementation"],
        ).eval()

    def generate(self, requests: list[Request]) -> list[list[int]]:
        order = list(range(len(requests)))
        if self._is_sorted:
            order.sort(key=lambda index: requests[index].prompt, reverse=True)
        outputs: dict[int, list[int]] = {}
        # One limit for each request takes the manager: generate_batch has one for all.
        with self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max(request.max_new_tokens for request in requests),
                eos_token_id=NO_END,
                pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(**self._settings),
        ) as manager:
            for index in order:
                manager.add_request(
                    requests[index].prompt,
                    request_id=str(index),
                    max_new_tokens=requests[index].max_new_tokens,
                    eos_token_id=NO_END,
                )
            while len(outputs) < len(requests):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("the manager has stopped; see the log above")
                elif result.error:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                elif result.is_finished():
                    outputs[int(result.request_id)] = list(result.generated_tokens)
        return [outputs[index] for index in range(len(requests))]


if __name__ == "__main__":
    perform(OPTIONS, Loaded, Loaded.generate)
