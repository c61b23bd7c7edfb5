"""The kernels, once with every instruction set of the machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from cbgen.engine.cpu import native
from cbgen.engine.cpu.native import Kernels


@pytest.fixture
def library() -> Kernels:
    """The library; without a compiler there is none, and nothing to test."""
    kernels = native.kernels()
    if kernels is None and shutil.which("c++") is None:
        pytest.skip("the kernels are not built, and there is no C++ compiler")
    assert kernels is not None, native.why_missing()
    return kernels


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = ("avx512", "avx2", "portable")
    if "kernels" in metafunc.fixturenames:
        metafunc.parametrize("kernels", names, indirect=True)
    if "int8_kernels" in metafunc.fixturenames:
        metafunc.parametrize("int8_kernels", ("avx512vnni", *names), indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what computes on several threads behind the parallel tests."""
    for item in items:
        if "threads" in getattr(item, "fixturenames", ()):
            item.add_marker("serial")


@pytest.fixture
def kernels(library: Kernels, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The library with one instruction set forced."""
    if request.param not in library.instruction_sets():
        pytest.skip(f"this machine or build lacks {request.param}")
    with library.using(request.param):
        yield library


@pytest.fixture
def int8_kernels(library: Kernels, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """As `kernels`, with the set whose kernels for int8 alone are its own."""
    if request.param not in library.instruction_sets():
        pytest.skip(f"this machine or build lacks {request.param}")
    with library.using(request.param):
        yield library


@pytest.fixture
def threads() -> Iterator[None]:
    """Gives torch's number of threads back, which a test may change."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
