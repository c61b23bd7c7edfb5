"""Requests of one batch that sample each in its own way.

python sampling_per_request.py MODEL
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cbgen

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer.encode("A good name for a cat is")

with cbgen.continuous_batching_context_manager(
    model, GenerationConfig(max_new_tokens=12), continuous_batching_config={"seed": 0}
) as manager:
    manager.add_request(prompt, request_id="greedy")
    manager.add_request(prompt, request_id="careful", temperature=0.3, top_p=0.9)
    manager.add_request(prompt, request_id="wild", temperature=1.5, top_k=50)
    manager.add_request(prompt, request_id="three", do_sample=True, num_return_sequences=3)
    for output in manager:
        text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        print(f"{output.request_id}: {text!r}")
