"""The bookkeeping half of the engine needs no torch, and all of the engine needs no orjson."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.sources import ROOT, cbgen_modules

BOOKKEEPING = (
    "cbgen.engine.scheduler",
    "cbgen.engine.cache.kv_cache",
    "cbgen.engine.request",
    "cbgen.engine.step",
    "cbgen.engine.plan",
    "cbgen.engine.config",
    "cbgen.engine.core",
    "cbgen.engine.loop",
    "tests.helpers.engine",
)

RUN_WITHOUT_ORJSON = """
import sys
sys.modules["orjson"] = None  # an import of it raises from here on
from tests.helpers.engine import make_request, run_engine
from tests.helpers.models import make_engine
with make_engine("llama", page_size=4, num_blocks=32) as built:
    outputs = run_engine(built.engine, [make_request("a", 5, max_new_tokens=3)])
assert len(outputs["a"].generated_tokens) == 3
"""

RUN_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from tests.helpers.engine import make_request, make_scheduler, run_scheduler
requests = [make_request(str(i), 5, max_new_tokens=8) for i in range(4)]
print(len(run_scheduler(make_scheduler(num_blocks=8), requests)))
"""


def run_python(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_the_bookkeeping_modules_loads_no_torch():
    imports = "\n".join(f"import {name}" for name in BOOKKEEPING)
    loaded = run_python(f"{imports}\nimport sys\nprint(*sys.modules)").split()
    assert not {"torch", "transformers", "numpy"} & set(loaded)
    assert set(BOOKKEEPING) <= set(loaded)


def test_a_schedule_runs_with_torch_absent():
    assert run_python(RUN_WITHOUT_TORCH) == "4"


def test_the_engine_runs_and_every_module_of_it_is_importable_with_orjson_absent():
    modules = {name for name in cbgen_modules() if name.startswith("cbgen.engine")}
    imports = "\n".join(f"import {name}" for name in sorted(modules))
    loaded = run_python(f"{RUN_WITHOUT_ORJSON}\n{imports}\nprint(*sys.modules)").split()
    assert modules <= set(loaded)
