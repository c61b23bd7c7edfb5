"""The inner loop of reinforcement learning, on one copy of the weights.

python rl_logprobs.py MODEL
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cbgen

model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
prompt = tokenizer.encode("2 + 2 =")
config = GenerationConfig(do_sample=True, max_new_tokens=8, eos_token_id=-1, num_return_sequences=4)

with cbgen.continuous_batching_context_manager(
    model, config, continuous_batching_config={"return_logprobs": True, "seed": 0}
) as manager:
    for step in range(3):
        manager.add_request(prompt)
        outputs = list(manager)  # the request and its three further samples
        rewards = torch.tensor(
            [float("4" in tokenizer.decode(o.generated_tokens)) for o in outputs]
        )
        with manager.pause():  # the model is ours: run it, train it; then generation goes on
            tokens = torch.tensor([prompt + output.generated_tokens for output in outputs])
            scores = model(tokens).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = scores.gather(-1, tokens[:, len(prompt) :, None])[..., 0]
            gap = (chosen - torch.tensor([o.logprobs for o in outputs])).abs().max()
            loss = -(chosen.sum(-1) * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"step {step}: mean reward {rewards.mean():.2f}, logprobs differ by {gap:.0e}")
