"""Print what is longer than it should be: `python -m tests.helpers.print_sizes`; never fails."""

from __future__ import annotations

import ast

from tests.helpers.sources import ROOT, python_files, syntax_tree

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
FOLDERS = ("cbgen", "tests", "examples", "benchmarks")


def long_files() -> list[str]:
    """Return a line for each file of more than MAX_FILE_LINES."""
    lengths = {path: len(path.read_bytes().splitlines()) for path in python_files(*FOLDERS)}
    return [
        f"{path.relative_to(ROOT)} has {length} lines"
        for path, length in lengths.items()
        if length > MAX_FILE_LINES
    ]


def long_functions() -> list[str]:
    """Return a line for each function of more than MAX_FUNCTION_LINES."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines"
        for path in python_files(*FOLDERS)
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


if __name__ == "__main__":
    for line in (*long_files(), *long_functions()):
        print(f"warning: {line}")
