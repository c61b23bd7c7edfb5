"""Runs and a manager under random use for minutes: nothing is lost or doubled, memory stays.

    OMP_NUM_THREADS=1 python -m tests.faults.soak --minutes 20 [--seed 0]

Runs go on in this process, to see its memory, and in others that are stopped or killed at random
and resumed. A manager answers and cancels requests meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import cbgen
from cbgen.cli.app import run_cli
from cbgen.engine.request import RequestStatus
from tests.faults.test_killed_processes import slow_down_and_die
from tests.helpers.commands import Command
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.small_runs import SUFFIXES, files_beside, read_output
from tests.helpers.tiny_checkpoint import save_tiny_checkpoint

MOST_GROWTH = 96 * 2**20
"""Bytes that the process may grow after the first third of its time: what allocators keep."""
INTERRUPTED = (-signal.SIGKILL, 130, 143, 4)
_ENDED = (RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.CANCELLED)


def main() -> None:
    """Soak for the minutes that were asked for; the exit code is 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak(Path(folder), 60 * options.minutes, options.seed)


def soak(folder: Path, seconds: float, seed: int) -> None:
    """Use cbgen in random ways for so long; AssertionError where it does not keep its promises."""
    chance = random.Random(seed)
    checkpoint = save_tiny_checkpoint(folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"model:\n  path: {checkpoint}\nprompt:\n  chat: false\n")
    start, end = time.monotonic(), time.monotonic() + seconds
    manager = ManagerUse(seed, end)
    num_runs, first_memory = 0, 0
    while time.monotonic() < end:
        num_runs += 1
        one_run(chance, folder, recipe, num_runs)
        gc.collect()
        if time.monotonic() < start + seconds / 3 or not first_memory:
            first_memory = resident_bytes()
        if num_runs % 10 == 0:
            tell(num_runs, manager)
    manager.finish()
    tell(num_runs, manager)
    assert resident_bytes() - first_memory < MOST_GROWTH, "memory grows"


def tell(num_runs: int, manager: ManagerUse) -> None:
    memory = f"{resident_bytes() / 2**20:.0f} MiB"
    sys.stdout.write(f"{num_runs} runs, {manager.num_answered} requests, {memory}\n")
    sys.stdout.flush()


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_run(chance: random.Random, folder: Path, recipe: Path, number: int) -> None:
    """Answer random rows with random options, here or in processes that die, until all are there.

    The ids of the rows and their answers must be those of an undisturbed run.
    """
    rows = [random_row(chance, index) for index in range(chance.randrange(1, 60))]
    source = folder / f"in-{number}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / f"out-{number}{chance.choice(SUFFIXES)}"
    arguments = ["run", str(recipe), "-i", str(source), "--quiet", *random_options(chance)]
    deaths = chance.choice((0, 0, 1, 3))
    for _ in range(deaths):
        die = partial(
            slow_down_and_die,
            chance.uniform(0, 0.4),
            chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)),
        )
        command = Command(*arguments, "-o", str(output), "--resume", prepare=die)
        code = command.wait()
        assert "Traceback" not in command.err.text, command.err.text
        assert code in (0, 1, *INTERRUPTED), (code, command.err.text)
    answers = []
    for path in (output, output.with_name(f"whole-{output.name}")):
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = run_cli([*arguments, "-o", str(path), "--resume"])
        assert code in (0, 1), (code, told.getvalue())
        assert "Traceback" not in told.getvalue(), told.getvalue()
        assert files_beside(path) == {"", ".run"}
        answers.append(sorted(read_output(path), key=lambda row: row["index"]))
        for name in files_beside(path):
            Path(f"{path}{name}").unlink()
    source.unlink()
    assert [row["index"] for row in answers[0]] == list(range(len(rows)))
    assert [row["id"] for row in answers[0]] == [row["id"] for row in rows]
    assert answers[0] == answers[1], arguments


def random_row(chance: random.Random, index: int) -> dict[str, object]:
    """Return an input row; some cannot be answered."""
    row: dict[str, object] = {"id": f"r{index}", "n": index}
    text = "".join(chance.choices("abc \u00e4\u20ac", k=chance.choice((1, 5, 40, 200))))
    kind = chance.random()
    if kind < 0.6:
        row["prompt"] = text
    elif kind < 0.8:
        row["messages"] = [{"role": "user", "content": text[:90]}]
    elif kind < 0.9:
        row["prompt_token_ids"] = chance.choices(range(4, 260), k=chance.randrange(1, 100))
    elif kind < 0.95:
        row["prompt"] = 5
    else:
        row["prompt_token_ids"] = [10**6]
    settings = {"max_new_tokens": chance.choice((1, 4, 30))}
    if chance.random() < 0.3:
        settings |= {"temperature": 0.8, "seed": index, "top_k": chance.choice((0, 5))}
    return row | {"generation_config": settings}


def random_options(chance: random.Random) -> list[str]:
    """Return options that change how rows are computed, and which are the same in a resume."""
    limits = {
        "page_size": (4, 16, 256), "num_blocks": (80, 300), "max_batch_tokens": (16, 300, 1024),
        "max_requests_per_batch": (1, 4, 64), "allow_block_sharing": ("true", "false"),
        "scheduler_type": ("fifo", "prefill_first"), "cpu_offload_space": (0, 0.01),
    }  # fmt: skip
    options = ["--order", chance.choice(("input", "completion"))]
    for name, values in limits.items():
        options += ["--set", f"continuous_batching_config.{name}={chance.choice(values)}"]
    return options


class ManagerUse:
    """A thread that adds and cancels requests of a manager until `end`, and counts outputs."""

    def __init__(self, seed: int, end: float) -> None:
        self.num_answered = 0
        self._chance, self._end = random.Random(f"manager {seed}"), end
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the manager does not end"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while time.monotonic() < self._end:
                self._session()
        except BaseException as error:  # noqa: BLE001  raised in `finish`
            self._error = error

    def _session(self) -> None:
        """Start a manager, send a few hundred requests, and stop it, sometimes at once."""
        chance = self._chance
        model = tiny_model("llama")
        manager = cbgen.init_continuous_batching(
            model,
            continuous_batching_config={
                "num_blocks": chance.choice((80, 200)), "page_size": chance.choice((4, 16)),
                "max_requests_per_batch": chance.choice((2, 16)),
            },
        )  # fmt: skip
        manager.start()
        waiting: set[str] = set()
        for _ in range(chance.randrange(1, 300)):
            prompt = chance.choices(range(1, VOCAB_SIZE + 2), k=chance.choice((0, 1, 8, 90)))
            waiting.add(manager.add_request(prompt, max_new_tokens=chance.choice((0, 1, 20))))
            if chance.random() < 0.2:
                manager.cancel_request(chance.choice(sorted(waiting)))
            if chance.random() < 0.3:
                self._take(manager, waiting)
            time.sleep(0.01)
        manager.stop(hard_stop=chance.random() < 0.3)
        while waiting:
            self._take(manager, waiting)
        assert manager.get_result(timeout=0) is None, "an output of no request"
        manager.destroy()

    def _take(self, manager: cbgen.ContinuousBatchingManager, waiting: set[str]) -> None:
        output = manager.get_result(timeout=30)
        assert output is not None, f"nothing comes for {waiting}"
        assert output.status in _ENDED
        waiting.remove(output.request_id)  # KeyError: it came twice
        self.num_answered += 1


if __name__ == "__main__":
    main()
