"""The library of kernels: it is built, it is found, and it says why where it is not."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch

from cbgen.engine.cpu import native
from cbgen.engine.cpu.packed import PackedWeight
from cbgen.errors import UsageError


def open_again() -> native.Kernels | str:
    return native._open.__wrapped__()


def threads_of_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_the_library_has_the_portable_kernels_last(library):
    assert library.instruction_sets()[-1] == "portable"


def test_the_best_instruction_set_is_chosen_first(library, monkeypatch):
    monkeypatch.delenv("CBGEN_INSTRUCTION_SET", raising=False)
    opened = open_again()
    assert isinstance(opened, native.Kernels)
    assert opened.instruction_sets()[0] == opened.selected()


def test_the_environment_names_another_instruction_set(library, monkeypatch):
    with library.using(library.selected()):
        monkeypatch.setenv("CBGEN_INSTRUCTION_SET", "portable")
        open_again()
        assert library.selected() == "portable"


def test_an_unknown_instruction_set_is_refused_with_the_known_ones(library):
    with pytest.raises(UsageError, match=r"'mmx'.*portable"):
        library.select("mmx")


def test_using_gives_the_instruction_set_back(library):
    before = library.selected()
    with library.using("portable"):
        assert library.selected() == "portable"
    assert library.selected() == before


def test_the_threads_of_the_kernels_are_those_of_torch(library, threads):
    packed = PackedWeight.pack(torch.ones(1024, 64), library)
    started = []

    def compute() -> None:
        # By identity, not by number: threads of an earlier test may end meanwhile.
        before = threads_of_process()
        packed.multiply(torch.ones(64, 64))  # a thread's first work for several starts the others
        of_kernels = threads_of_process()
        torch.ones(1 << 20).exp_()
        started.append(of_kernels - before)
        started.append(threads_of_process() - of_kernels)

    torch.set_num_threads(3)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    of_kernels, of_torch = started
    assert len(of_kernels) == 2
    assert not of_torch


def test_the_library_knows_no_openmp_runtime_of_its_own(library):
    content = native.LIBRARY.read_bytes()
    assert b"GOMP_" not in content
    assert b"omp.so" not in content


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    reason = open_again()
    assert isinstance(reason, str)
    assert "none.so is missing" in reason


def test_a_damaged_library_is_a_reason_not_an_error(monkeypatch, tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(native, "LIBRARY", damaged)
    reason = open_again()
    assert isinstance(reason, str)
    assert "damaged.so" in reason


def test_a_library_of_another_version_is_a_reason(library, monkeypatch):
    monkeypatch.setattr(native, "_INTERFACE", -1)
    reason = open_again()
    assert isinstance(reason, str)
    assert "another version" in reason


def test_structures_are_as_large_as_in_c(library):
    c_library = ctypes.CDLL(str(native.LIBRARY))
    assert c_library.cbgen_linear_bytes() == ctypes.sizeof(native.Linear)
    assert c_library.cbgen_attention_bytes() == ctypes.sizeof(native.Attention)
    assert c_library.cbgen_decoder_layer_bytes() == ctypes.sizeof(native.DecoderLayer)
    assert c_library.cbgen_decoder_bytes() == ctypes.sizeof(native.Decoder)
    assert c_library.cbgen_step_bytes() == ctypes.sizeof(native.Step)


def test_a_dtype_that_the_kernels_do_not_know_is_the_reason_against_them():
    assert native.why_unfit(torch.float64) == "the C++ kernels do not know torch.float64"
    assert native.why_unfit(torch.float32) == native.why_missing()


def test_multiply_adds_are_counted_on_all_threads(kernels, threads):
    counts = []
    for number in (1, 2):
        torch.set_num_threads(number)
        counts.append(kernels.multiply_add(10))
    assert counts[1] == 2 * counts[0] > 0
