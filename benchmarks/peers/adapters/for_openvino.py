"""OpenVINO GenAI: its continuous batching pipeline on a CPU; the model is an exported folder.

Options: `precision` is what it computes in (f32, bf16, f16), `kv_precision` what the cache holds
(null: its choice), `cache_gib` the size of the cache, `max_batch_tokens` and `max_requests` the
bounds of a step, `prefix_caching` whether requests share what they begin with.
"""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai
from job import Job, Request, perform

OPTIONS = {
    "precision": "f32",
    "kv_precision": None,
    "cache_gib": 4,
    "max_batch_tokens": 2048,
    "max_requests": 128,
    "prefix_caching": True,
}


def load(job: Job) -> openvino_genai.ContinuousBatchingPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = job.options["cache_gib"]
    scheduler.max_num_batched_tokens = job.options["max_batch_tokens"]
    scheduler.max_num_seqs = job.options["max_requests"]
    scheduler.enable_prefix_caching = job.options["prefix_caching"]
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": job.options["precision"],
        "INFERENCE_NUM_THREADS": job.threads,
    }
    if job.options["kv_precision"] is not None:
        properties["KV_CACHE_PRECISION"] = job.options["kv_precision"]
    return openvino_genai.ContinuousBatchingPipeline(job.model, scheduler, "CPU", properties)


def generate(
    pipeline: openvino_genai.ContinuousBatchingPipeline, requests: list[Request]
) -> list[list[int]]:
    configs, prompts = [], []
    for request in requests:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_new_tokens
        config.ignore_eos = True
        config.do_sample = False
        configs.append(config)
        prompts.append(openvino.Tensor(np.array([request.prompt], dtype=np.int64)))
    results = pipeline.generate(prompts, configs)
    return [result.m_generation_ids[0] for result in results]


if __name__ == "__main__":
    perform(OPTIONS, load, generate)
