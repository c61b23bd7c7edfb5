"""Process settings of every test, set before anything imports torch: few threads, no model hub."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
