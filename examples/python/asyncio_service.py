"""Serve many clients from one event loop.

python asyncio_service.py MODEL
"""

from __future__ import annotations

import asyncio
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import cbgen

QUESTIONS = ("What is a cat?", "What is a dog?", "What is rain?", "What is bread?")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


async def answer(manager: cbgen.ContinuousBatchingManager, question: str) -> str:
    """Answer one client; a real service would send each piece on as it comes."""
    request_id = manager.add_request(tokenizer.encode(question), streaming=True)
    try:
        outputs = manager.request_id_aiter(request_id)
        return "".join([output.text_delta async for output in outputs])
    finally:
        manager.cancel_request(request_id)  # in case the client has gone away


async def serve() -> None:
    """Answer all clients at once."""
    config = GenerationConfig(max_new_tokens=16)
    with cbgen.continuous_batching_context_manager(model, config, tokenizer=tokenizer) as manager:
        answers = await asyncio.gather(*(answer(manager, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {text!r}")


asyncio.run(serve())
