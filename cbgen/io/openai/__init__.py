"""Lines of OpenAI and vLLM batch files: what they ask and how they are answered."""
