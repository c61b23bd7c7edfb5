"""Builds the C++ kernels of the CPU path; everything else about the package is in pyproject.toml.

The kernels are a plain shared library that Python opens with ctypes, so neither Python's headers
nor torch's are needed. Where they cannot be compiled the package is installed without them.
"""

from __future__ import annotations

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # what is fused is written down, so that all row counts round alike
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-uninitialized",  # GCC 12 suspects its own intrinsics
    "-Wno-maybe-uninitialized",
]
"""Behind Python's own flags, which they override."""

SHARED_SOURCES = {
    "cbgen/csrc/api.cpp": [],
    "cbgen/csrc/attention_tasks.cpp": [],
    "cbgen/csrc/decoder_tasks.cpp": [],
    "cbgen/csrc/kernels_portable.cpp": [],
    "cbgen/csrc/linear_tasks.cpp": [],
    "cbgen/csrc/parallel.cpp": [],
    "cbgen/csrc/screen_tasks.cpp": [],
}
AVX512_FLAGS = [
    *["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"]
]
X86_SOURCES = {
    "cbgen/csrc/kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "cbgen/csrc/kernels_avx512.cpp": AVX512_FLAGS,
    "cbgen/csrc/kernels_avx512vnni.cpp": [*AVX512_FLAGS, "-mavx512vnni"],
}
HEADERS = [
    "attention.h",
    "attention_pages.h",
    "attention_work.h",
    "decoder.h",
    "decoder_tasks.h",
    "int8.h",
    "int8_packing.h",
    "kernels.h",
    "largest.h",
    "linear.h",
    "memory.h",
    "packing.h",
    "parallel.h",
    "peak.h",
    "rows.h",
    "screen.h",
    "shared_segments.h",
    "vector.h",
]


def sources() -> dict[str, list[str]]:
    """Return the sources of this machine's architecture, each with flags of its own."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return SHARED_SOURCES | (X86_SOURCES if is_x86 else {})


class BuildKernels(build_ext):
    """Compiles each source with its own flags; the library chooses among them when it runs."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link the one extension of the package."""
        objects = []
        for source, flags in sources().items():
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=[*COMMON_FLAGS, *flags],
                depends=extension.depends,
            )
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(extension.name), target_lang="c++"
        )

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without Python's version: it does not depend on it."""
        return f"{fullname.replace('.', '/')}.so"


setup(
    ext_modules=[
        Extension(
            "cbgen.engine.cpu._kernels",
            sources=list(sources()),
            depends=[f"cbgen/csrc/{name}" for name in HEADERS],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
