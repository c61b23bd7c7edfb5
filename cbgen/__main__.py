"""The command line as a process: `cbgen`, and `python -m cbgen`."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and end it."""
    # The imports take a moment in which there is nothing to end but the process.
    numbers = (signal.SIGINT, signal.SIGTERM)
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _end_process) for number in heard}
    from cbgen.cli.app import main as run_process

    for number, handler in before.items():
        signal.signal(number, handler)
    run_process()


def _end_process(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
