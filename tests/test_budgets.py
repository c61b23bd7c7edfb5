"""Size budgets: what does not fit is split, or is two things."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.sources import ROOT, python_files, syntax_tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 250
MAX_PARAMETERS = 8

MANY_PARAMETERS_FOLDERS = ("cbgen/cli", "cbgen/engine/attention")
"""CLI commands have a parameter for each option; kernels take their tensors one by one."""

MIRRORED_FUNCTIONS = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "add_request",
    "add_requests",
)
"""Public functions that keep the parameters of the transformers function of the same name."""

FOLDERS = ("cbgen", "tests", "examples", "benchmarks")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(*kinds: type[ast.stmt]) -> Iterator[tuple[Path, ast.stmt]]:
    for path in python_files(*FOLDERS):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, kinds):
                yield path, node


def num_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def num_parameters(function: FunctionNode) -> int:
    """Count the parameters that a caller gives: without `self` and `cls`."""
    names = [
        argument.arg
        for argument in (
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
            *filter(None, (function.args.vararg, function.args.kwarg)),
        )
    ]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def may_have_many_parameters(path: Path, function: FunctionNode) -> bool:
    folder = path.relative_to(ROOT).as_posix()
    return function.name in MIRRORED_FUNCTIONS or folder.startswith(MANY_PARAMETERS_FOLDERS)


def too_long(limit: int, *kinds: type[ast.stmt]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {num_lines(node)} lines"
        for path, node in definitions(*kinds)
        if num_lines(node) > limit
    ]


def test_no_file_is_longer_than_its_budget():
    lengths = {path: len(path.read_bytes().splitlines()) for path in python_files(*FOLDERS)}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_its_budget():
    assert too_long(MAX_FUNCTION_LINES, ast.FunctionDef, ast.AsyncFunctionDef) == []


def test_no_class_is_longer_than_its_budget():
    assert too_long(MAX_CLASS_LINES, ast.ClassDef) == []


def test_no_function_has_more_parameters_than_its_budget():
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {num_parameters(node)} parameters"
        for path, node in definitions(ast.FunctionDef, ast.AsyncFunctionDef)
        if num_parameters(node) > MAX_PARAMETERS and not may_have_many_parameters(path, node)
    ]
    assert wrong == []
