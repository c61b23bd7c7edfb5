"""Bookkeeping of the KV cache: blocks, block tables, layer groups. No torch in here."""
