"""transformers `generate` on batches of `batch` requests, padded on the left, sorted by length.

A batch runs until its longest answer ends. With `batch: 1` nothing is padded and no other request
has a say: the reference that sequences are compared with.
"""

from __future__ import annotations

import torch
from job import Job, Request, perform
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


class Batches:
    """A loaded model, and how many requests it is given at a time."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._batch = job.options["batch"]
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            job.model,
            dtype=getattr(torch, job.options["dtype"]),
            attn_implementation=job.options["attn_implementation"],
        ).eval()

    def generate(self, requests: list[Request]) -> list[list[int]]:
        order = sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt))
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), self._batch):
            indices = order[start : start + self._batch]
            tokens = self._run([requests[index] for index in indices])
            outputs.update(zip(indices, tokens, strict=True))
        return [outputs[index] for index in range(len(requests))]

    def _run(self, requests: list[Request]) -> list[list[int]]:
        width = max(len(request.prompt) for request in requests)
        prompts = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, request in enumerate(requests):
            prompts[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(request.max_new_tokens for request in requests),
            eos_token_id=None,
            pad_token_id=0,
        )
        # The model's own settings would fill what the config leaves open, its end tokens included.
        self._model.generation_config = config
        with torch.inference_mode():
            answers = self._model.generate(prompts, attention_mask=mask, generation_config=config)
        return [
            answers[row, width : width + request.max_new_tokens].tolist()
            for row, request in enumerate(requests)
        ]


if __name__ == "__main__":
    perform(
        {"batch": 32, "dtype": "float32", "attn_implementation": "sdpa"}, Batches, Batches.generate
    )
