"""Token ids to text while an answer grows. Engines without a tokenizer have none of this."""
