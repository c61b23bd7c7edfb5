"""The budget of one step: how many tokens it may still run."""

from __future__ import annotations


class TokenBudget:
    """Counts down the tokens of one forward pass."""

    __slots__ = ("_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0

    @property
    def used(self) -> int:
        """Tokens taken so far."""
        return self._used

    @property
    def left(self) -> int:
        """Tokens that can still be taken."""
        return self._limit - self._used

    def take(self, wanted: int) -> int:
        """Take up to `wanted` tokens and return how many were there."""
        taken = min(wanted, self.left)
        self._used += taken
        return taken
