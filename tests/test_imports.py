"""Who may import whom. The packages and their order are drawn in docs/architecture.md."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter

import pytest

from tests.helpers.sources import ROOT, ImportLine, cbgen_modules, imports_of

SHARED = ("cbgen.errors", "cbgen.values")
GENERATION = ("cbgen.generation",)
JOB = (*SHARED, *GENERATION, "cbgen.recipe", "cbgen.io", "cbgen.engine")

MAY_IMPORT = {
    "cbgen.errors": (),
    "cbgen.values": (),
    "cbgen.generation": (*SHARED, "cbgen.engine.sampling.params"),
    "cbgen.engine": SHARED,
    "cbgen.io": (*SHARED, *GENERATION),
    "cbgen.recipe": (*SHARED, *GENERATION, "cbgen.engine.config"),
    "cbgen.manager": (*SHARED, *GENERATION, "cbgen.engine"),
    "cbgen.job": JOB,
    "cbgen.bench": (*JOB, "cbgen.job"),
    "cbgen.cli": (*JOB, "cbgen", "cbgen.job", "cbgen.bench"),
    "cbgen.__main__": ("cbgen.cli",),
    "cbgen": (*JOB, "cbgen.job", "cbgen.manager"),
}
"""What each part may import beside itself; "cbgen" is the package's own `__init__`."""

ENGINE_LEVELS = (
    ("attention.backends", "config", "sampling.params", "cache.groups", "text"),
    ("step", "cache.shape", "sizing", "plan", "request", "events"),
    ("cpu.native",),
    ("cache", "batch", "storage", "memory", "model", "cpu", "attention", "sampling", "forward"),
    ("scheduler", "runner"),
    ("core",),
    ("build", "loop"),
)
"""The engine from bottom to top: a module imports from its own level and those before it."""

WITHOUT_TORCH = (
    "cbgen.errors",
    "cbgen.values",
    "cbgen.generation",
    "cbgen.recipe",
    "cbgen.io",
    "cbgen.engine.config",
    "cbgen.engine.attention.backends",
    "cbgen.engine.plan",
    "cbgen.engine.sizing",
    "cbgen.engine.step",
    "cbgen.engine.request",
    "cbgen.engine.events",
    "cbgen.engine.cache",
    "cbgen.engine.scheduler",
    "cbgen.engine.text",
    "cbgen.engine.sampling.params",
)
"""Modules that never import torch or transformers, not even inside a function."""

SLOW_TO_IMPORT = ("torch", "transformers", "numpy", "tokenizers")
MAY_IMPORT_ORJSON = ("cbgen.io", "cbgen.job", "cbgen.bench", "cbgen.cli")

COMMANDS = ("bench", "init", "merge", "plan", "run", "schema")
"""Modules of cbgen.cli that are named after their command, whatever else has that name."""


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def part_of(module: str) -> str:
    """Return the key of MAY_IMPORT that `module` belongs to."""
    return ".".join(module.split(".")[:2])


def engine_level(module: str) -> int | None:
    """Return the level of an engine module by its longest name in ENGINE_LEVELS, else None."""
    names = [
        (len(name), level)
        for level, row in enumerate(ENGINE_LEVELS)
        for name in row
        if is_within(module, f"cbgen.engine.{name}")
    ]
    return max(names)[1] if names else None


def place(module: str, line: ImportLine) -> str:
    return f"{cbgen_modules()[module].relative_to(ROOT)}:{line.line}: imports {line.target}"


def all_imports() -> list[tuple[str, ImportLine]]:
    return [(name, line) for name, path in cbgen_modules().items() for line in imports_of(path)]


def may_import(module: str, target: str) -> bool:
    """Whether the rule lets a module import a target; the package's own `__init__` only exactly."""
    allowed = MAY_IMPORT[part_of(module)]
    return target in allowed or is_within(target, *(name for name in allowed if name != "cbgen"))


def test_every_part_has_its_place_in_the_import_rule():
    assert {part_of(module) for module in cbgen_modules()} <= set(MAY_IMPORT)


def test_parts_import_only_the_parts_below_them():
    wrong = [
        place(module, line)
        for module, line in all_imports()
        if is_within(line.target, "cbgen")
        and part_of(line.target) != part_of(module)
        and not may_import(module, line.target)
    ]
    assert wrong == []


def test_every_engine_module_has_a_level():
    modules = [name for name in cbgen_modules() if name.startswith("cbgen.engine.")]
    assert [name for name in modules if engine_level(name) is None] == []


def test_engine_modules_import_no_level_above_theirs():
    wrong = []
    for module, line in all_imports():
        own, other = engine_level(module), engine_level(line.target)
        if own is not None and other is not None and other > own:
            wrong.append(place(module, line))
    assert wrong == []


def test_no_two_modules_share_a_file_name():
    commands = [ROOT / "cbgen" / "cli" / f"{name}.py" for name in COMMANDS]
    names = Counter(path.name for path in cbgen_modules().values() if path not in commands)
    shared = {name for name, count in names.items() if count > 1} - {"__init__.py", "base.py"}
    assert shared == set()


def test_no_modules_import_each_other_in_a_circle():
    graph = {
        name: {line.target for line in imports_of(path) if line.target in cbgen_modules()} - {name}
        for name, path in cbgen_modules().items()
        if name != "cbgen"
    }
    TopologicalSorter(graph).prepare()


def test_bookkeeping_modules_never_import_torch():
    wrong = [
        place(module, line)
        for module, line in all_imports()
        if is_within(module, *WITHOUT_TORCH) and is_within(line.target, *SLOW_TO_IMPORT)
    ]
    assert wrong == []


def test_orjson_is_imported_by_io_job_and_cli_alone():
    wrong = [
        place(module, line)
        for module, line in all_imports()
        if is_within(line.target, "orjson") and not is_within(module, *MAY_IMPORT_ORJSON)
    ]
    assert wrong == []


@pytest.mark.parametrize("part", ["cbgen.cli", "cbgen.recipe", "cbgen.generation", "cbgen.io"])
def test_importing_every_module_of_a_light_part_loads_no_torch(part):
    modules = [name for name in cbgen_modules() if is_within(name, part)]
    assert loaded_after(*modules) & set(SLOW_TO_IMPORT) == set()


@pytest.mark.parametrize("module", ["cbgen", "cbgen.engine"])
def test_importing_the_library_loads_no_io_no_cli_and_no_orjson(module):
    assert loaded_after(module) & {"cbgen.io", "cbgen.cli", "orjson"} == set()


def loaded_after(*modules: str) -> set[str]:
    """Return the names in `sys.modules` of a fresh interpreter that imported `modules`."""
    lines = [*(f"import {name}" for name in modules), "import sys", "print(*sys.modules)"]
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())
