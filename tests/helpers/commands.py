"""The command line as a process that a test talks to, forked from one that has loaded torch."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pty
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Literal, TextIO

SECONDS = 60.0
"""How long a test waits for what must happen."""

Stream = Literal["pipe", "terminal", "abandoned", "closed"]
"""Read by the test; a terminal, one for all streams; a pipe without a reader; not open at all."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["cbgen.cli.app", "cbgen.job.run_job", "transformers.models.llama.modeling_llama"]
)


def parse_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a JSONL text; every line must be one."""
    assert text == "" or text.endswith("\n"), text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def jsonl(*rows: object) -> bytes:
    """Return rows as lines: objects as JSON, bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return b"".join(line + b"\n" for line in lines)


class Output:
    """What a process writes into a descriptor; collected on a thread, so that it never waits."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def wait_for(self, part: str) -> None:
        """Return once the text holds `part`."""
        with self._changed:
            self._changed.wait_for(lambda: part in self.text or self._ended, SECONDS)
            assert part in self.text, self.text

    def finish(self) -> None:
        """Return once the other side is closed."""
        self._thread.join(SECONDS)
        assert self._ended, self.text

    def _collect(self) -> None:
        data = b""
        while not self._ended:
            try:
                part = os.read(self._descriptor, 65536)
            except OSError:  # how a terminal ends
                part = b""
            data += part
            with self._changed:
                self.text = data.decode("utf-8", errors="replace")
                self._ended = not part
                self._changed.notify_all()
        os.close(self._descriptor)


class Command:
    """A running `cbgen`; its stdin is a pipe that stays open until `end_input`.

    Args:
        arguments: of the command line.
        out: what stdout is.
        err: what stderr is.
        environment: variables to add.
        prepare: called in the process before the command begins; a function of a module.
    """

    def __init__(
        self,
        *arguments: str,
        out: Stream = "pipe",
        err: Stream = "pipe",
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        stdin, self._input = os.pipe()
        self.out, stdout = _open_stream(out)
        self.err, stderr = _open_stream(err) if (out, err) != _TERMINAL else (self.out, stdout)
        inner = [None if end is None else os.dup(end) for end in (stdin, stdout, stderr)]
        ends = [None if end is None else Connection(end) for end in inner]
        self._process = _forks.Process(
            target=_enter, args=(list(arguments), ends, dict(environment or {}), prepare)
        )
        self._process.start()
        for end in {stdin, stdout, stderr} - {None}:
            os.close(end)
        for connection in filter(None, ends):
            connection.close()

    def write(self, *rows: object) -> None:
        """Write input rows."""
        os.write(self._input, jsonl(*rows))

    def end_input(self) -> None:
        """Close stdin."""
        os.close(self._input)
        self._input = -1

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = SECONDS) -> int:
        """Return the exit code once the process has ended and all it wrote is here."""
        self._process.join(timeout)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        assert code is not None, f"no end within {timeout} seconds"
        for output in filter(None, (self.out, self.err)):
            output.finish()
        if self._input >= 0:
            self.end_input()
        return code


_TERMINAL = ("terminal", "terminal")


def _open_stream(kind: Stream) -> tuple[Output | None, int | None]:
    """Return the test's and the process's end of a stream."""
    if kind == "closed":
        return None, None
    outer, inner = pty.openpty() if kind == "terminal" else os.pipe()
    if kind == "abandoned":
        os.close(outer)
        return None, inner
    return Output(outer), inner


def _enter(
    arguments: list[str],
    ends: list[Connection | None],
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
) -> None:
    """Become the command in a new process."""
    os.environ.update(environment)
    streams: list[TextIO | None] = []
    for descriptor, end in enumerate(ends):
        if end is None:
            os.close(descriptor)
            streams.append(None)
        else:
            os.dup2(end.fileno(), descriptor)
            end.close()
            mode = "r" if descriptor == 0 else "w"
            streams.append(open(descriptor, mode, closefd=False))  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["cbgen", *arguments]
    gc.freeze()  # what was loaded before the fork need not be searched for garbage
    if prepare is not None:
        prepare()
    from cbgen.cli.app import main

    main()
