"""Print an answer while it grows.

python streaming.py MODEL [PROMPT]
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cbgen

name, prompt = sys.argv[1], " ".join(sys.argv[2:]) or "The three primary colours are"
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)

with cbgen.continuous_batching_context_manager(
    model, GenerationConfig(max_new_tokens=48), tokenizer=tokenizer
) as manager:
    request_id = manager.add_request(tokenizer.encode(prompt), streaming=True)
    for chunk in manager.request_id_iter(request_id):
        # chunk.generated_tokens has all tokens so far, chunk.new_tokens those of this step.
        print(chunk.text_delta, end="", flush=True)
print(f"\n[{chunk.finish_reason} after {len(chunk.generated_tokens)} tokens]")
