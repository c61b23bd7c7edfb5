"""A model on loan to engines: in evaluation mode and hooked while they run it, else as it was.

What the managers of one model have to agree on is here too: a pause holds all of them. Whoever
pauses may change weights in place, so no engine may run the model meanwhile, also none that is just
being built.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from cbgen.engine.loop import EngineLoop
from cbgen.engine.model.attach import attached
from cbgen.errors import EngineError


class SharedModel:
    """Owns the loan of one model to its engines, and the pauses that hold all of them. Thread-safe.

    It must not keep the model alive. Whoever runs an engine does.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._changed = threading.Condition()
        self._loops: list[EngineLoop] = []  # that run
        self._held: list[EngineLoop] = []
        self._num_starting = 0
        self._pausing_threads: Counter[int] = Counter()
        self._loan = ExitStack()  # is closed to give the model back
        self._is_lent = False

    @property
    def is_paused(self) -> bool:
        """Whether a pause holds the engines, so that they run nothing."""
        return bool(self._pausing_threads)

    def is_pausing(self) -> bool:
        """Whether the calling thread holds a pause."""
        return self._pausing_threads[threading.get_ident()] > 0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Run the model to build an engine, and start it; no pause begins meanwhile.

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

    def add(self, loop: EngineLoop) -> None:
        """Lend the model to an engine, inside of `starting`, and hold it in pauses from now on."""
        with self._changed:
            self._loops.append(loop)
            self._lend()

    def remove(self, loop: EngineLoop) -> None:
        """Forget an engine that has ended; after the last one the model is as it was."""
        with self._changed:
            self._loops.remove(loop)
            if not self._loops:
                self._give_back()

    @contextmanager
    def pause(self, loop: EngineLoop) -> Iterator[None]:
        """Hold all engines of the model, and give it back; several threads may do so at once.

        Raises:
            EngineError: the engine of `loop` has ended.
        """
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_starting)
            if loop not in self._loops:
                raise EngineError("the engine has ended")
            if not self._pausing_threads:
                self._hold_all(loop)
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

    def _hold_all(self, wanted: EngineLoop) -> None:
        try:
            for loop in self._loops:
                try:
                    loop.pause()
                except EngineError:
                    if loop is wanted:
                        raise
                else:
                    self._held.append(loop)
            self._give_back()
        except BaseException:  # it has ended, or the caller was interrupted
            self._release_all()
            raise

    def _release_all(self) -> None:
        if self._loops:  # some may have died meanwhile
            self._lend()
        while self._held:
            self._held.pop().resume()

    def _lend(self) -> None:
        model = self._model()
        if not self._is_lent and model is not None:
            self._loan.enter_context(attached(model))
            self._is_lent = True

    def _give_back(self) -> None:
        self._loan.close()
        self._is_lent = False


_lock = threading.Lock()
_shared_models: weakref.WeakKeyDictionary[PreTrainedModel, SharedModel]
_shared_models = weakref.WeakKeyDictionary()


def shared_model(model: PreTrainedModel) -> SharedModel:
    """Return what the engines of a model share, the same object for the same model."""
    with _lock:
        return _shared_models.setdefault(model, SharedModel(model))
