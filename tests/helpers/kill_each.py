"""Runs that are killed with SIGKILL before each of their operations on the disk, then resumed.

A program, so that it can fork: none of its threads does anything, and it loads no torch.

    python -m tests.helpers.kill_each FOLDER SUFFIX ORDER [again]
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet  # noqa: F401  so that not every child has to

from tests.helpers.dying_disk import DyingDisk, small_sizes
from tests.helpers.small_runs import assert_same_output, make_recipe, run_small, write_input

ROWS = 12
NEVER = 10**9


def main(folder: Path, suffix: str, order: str, again: bool) -> None:
    """Kill a run, or the resume of a killed one, before operation 0, 1, 2, ... until it ends."""
    os.fsync = lambda descriptor: None  # a killed process leaves what it wrote, synced or not
    source = write_input(folder, ROWS)
    recipe = make_recipe(order)
    reference = folder / f"reference{suffix}"
    output = folder / "run" / f"out{suffix}"

    def run(dies_at: int, resume: bool) -> None:
        with small_sizes(), DyingDisk(dies_at, kills=True):
            run_small(source, output, recipe, resume=resume)

    def finish() -> None:
        run(NEVER, True)
        assert_same_output(output, reference, order)

    assert in_child(lambda: run_small(source, reference, recipe)) == 0
    output.parent.mkdir()
    middle = in_child(lambda: run(20, False)) if again else 0
    assert middle == (-signal.SIGKILL if again else 0)
    start = shutil.copytree(output.parent, folder / "start")
    num_deaths = 0
    while code := in_child(partial(run, num_deaths, again)):
        assert code == -signal.SIGKILL, f"operation {num_deaths}: exit {code}"
        assert in_child(finish) == 0, f"after a death before operation {num_deaths}"
        shutil.rmtree(output.parent)
        shutil.copytree(start, output.parent)
        num_deaths += 1
    sys.stdout.write(f"{num_deaths}\n")


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked process; return its exit code, -9 where it was killed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001  the process ends here, whatever it is
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "again" in sys.argv[4:])
