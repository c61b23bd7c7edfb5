"""vLLM on a CPU, in this process. Its memory and threads are set by variables: see README.md."""

from __future__ import annotations

from job import Job, Request, perform
from vllm import LLM, SamplingParams

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2304,
    "enable_prefix_caching": True,
}


def load(job: Job) -> LLM:
    return LLM(
        model=job.model,
        max_model_len=max(job.longest, job.options["max_num_batched_tokens"]),
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **job.options,
    )


def generate(model: LLM, requests: list[Request]) -> list[list[int]]:
    outputs = model.generate(
        [{"prompt_token_ids": request.prompt} for request in requests],
        [
            SamplingParams(
                temperature=0,
                max_tokens=request.max_new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    perform(OPTIONS, load, generate)
