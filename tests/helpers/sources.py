"""The repository's Python files as syntax trees, for the tests that hold its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class ImportLine:
    """One imported module and the line where it stands."""

    target: str
    line: int


def python_files(*folders: str) -> list[Path]:
    """Return the Python files of the named top folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def cbgen_modules() -> dict[str, Path]:
    """Return every module of cbgen by its full name; a package is named without `__init__`."""
    return {module_name(path): path for path in python_files("cbgen")}


def module_name(path: Path) -> str:
    """Return the dotted name under which `path` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> list[ImportLine]:
    """Return all imports of a file, those inside functions and under TYPE_CHECKING included."""
    return list(_imports(syntax_tree(path)))


def _imports(tree: ast.Module) -> Iterator[ImportLine]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield ImportLine(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield ImportLine(_target(node, alias.name), node.lineno)


def _target(statement: ast.ImportFrom, name: str) -> str:
    """Return what `from x import name` reaches: x.name if that is a module of cbgen, else x."""
    module = statement.module or ""
    return f"{module}.{name}" if f"{module}.{name}" in cbgen_modules() else module
