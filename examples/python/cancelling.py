"""End a request early and keep what it has.

python cancelling.py MODEL
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cbgen

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
config = GenerationConfig(max_new_tokens=200, eos_token_id=-1)  # -1: no token ends the answer

with cbgen.continuous_batching_context_manager(model, config, tokenizer=tokenizer) as manager:
    manager.add_request(tokenizer.encode("Count up:"), request_id="counting", streaming=True)
    manager.add_request(tokenizer.encode("Hello"), request_id="short", max_new_tokens=4)
    for chunk in manager.request_id_iter("counting"):
        if len(chunk.generated_tokens) == 10:
            manager.cancel_request("counting")  # one more output comes, with status CANCELLED
    (short,) = manager.as_completed(["short"])

print(f"counting: {chunk.status.name} after {len(chunk.generated_tokens)} tokens")
print(f"short: {short.status.name} after {len(short.generated_tokens)} tokens")
