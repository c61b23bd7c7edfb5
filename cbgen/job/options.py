"""What a run needs beside its recipe. Loads nothing: a command line is checked before torch is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the command line adds to a recipe."""

    input: str
    """File, or `-` for stdin."""
    output: str
    """File, or `-` for stdout."""
    overwrite: bool = False
    """Replace an existing output."""
    limit: int | None = None
    """Rows to take from the input; None = all."""
    strict: bool = False
    """End with UsageError at the first row that carries an error."""
