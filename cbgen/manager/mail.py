"""What readers of outputs are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cbgen.errors import EngineError
from cbgen.manager.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Closed:
    """Stands behind the last output: nothing more will come.

    Attributes:
        failure: what ended the engine, None after a stop.
        output: in a follower's mailbox after a failure, its request as it failed.
    """

    failure: EngineError | None = None
    output: RequestOutput | None = None


Mail = RequestOutput | Closed


class Mailbox(Protocol):
    """Takes what a follower is sent; called on the engine's thread."""

    def put(self, item: Mail) -> None:
        """Take an output or the end of them.

        Raises:
            MailboxGone: nobody reads it any more.
        """


class MailboxGone(Exception):
    """The reader of a mailbox has gone away."""
