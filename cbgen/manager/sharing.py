"""What the managers of one model have to agree on: a pause holds all of them.

Whoever pauses may change weights in place, so no engine may run the model meanwhile, also none that
is just being built.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from transformers import PreTrainedModel

from cbgen.errors import EngineError


class User(Protocol):
    """An engine that runs a model."""

    def hold(self) -> None:
        """Return once no step runs and the model is given back.

        Raises:
            EngineError: the engine has ended.
        """

    def release(self) -> None:
        """Take back `hold`; nothing happens if the engine has ended."""


class ModelUsers:
    """Owns the users of one model and the pauses that hold them. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: list[User] = []
        self._held: list[User] = []
        self._num_starting = 0
        self._pausing_threads: Counter[int] = Counter()

    def is_pausing(self) -> bool:
        """Whether the calling thread holds a pause."""
        return self._pausing_threads[threading.get_ident()] > 0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Run the model to build an engine, and add its user; no pause begins meanwhile.

        Waits until no pause is held.

        Raises:
            RuntimeError: the calling thread holds one.
        """
        if self.is_pausing():
            raise RuntimeError(
                "a manager cannot start inside of a pause() of its model: it would wait for the "
                "pause to end; leave the pause first"
            )
        with self._changed:
            self._changed.wait_for(lambda: not self._pausing_threads)
            self._num_starting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()

    def add(self, user: User) -> None:
        """Hold a user in pauses from now on."""
        with self._changed:
            self._users.append(user)

    def remove(self, user: User) -> None:
        """Forget a user, if it is known."""
        with self._changed:
            if user in self._users:
                self._users.remove(user)

    @contextmanager
    def pause(self, user: User) -> Iterator[None]:
        """Hold all users; several threads may do so at once.

        Raises:
            EngineError: `user` has ended.
        """
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_starting)
            if user not in self._users:
                raise EngineError("the engine has ended")
            if not self._pausing_threads:
                self._hold_all(user)
            self._pausing_threads[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._pausing_threads[thread] -= 1
                self._pausing_threads += Counter()  # drops those at 0
                if not self._pausing_threads:
                    self._release_all()
                    self._changed.notify_all()

    def _hold_all(self, wanted: User) -> None:
        try:
            for user in self._users:
                try:
                    user.hold()
                except EngineError:
                    if user is wanted:
                        raise
                else:
                    self._held.append(user)
        except BaseException:  # it has ended, or the caller was interrupted
            self._release_all()
            raise

    def _release_all(self) -> None:
        while self._held:
            self._held.pop().release()


_lock = threading.Lock()
_models: weakref.WeakKeyDictionary[PreTrainedModel, ModelUsers] = weakref.WeakKeyDictionary()


def users_of(model: PreTrainedModel) -> ModelUsers:
    """Return the users of a model, the same object for the same model."""
    with _lock:
        return _models.setdefault(model, ModelUsers())
