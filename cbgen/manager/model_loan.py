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
    """Owns the pauses that hold all engines of one model.

    Thread-safe. Has no reference to the model, which it must not keep alive.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loans: list[ModelLoan] = []  # of engines that run
        self._num_starting = 0
        self._pausing_threads: Counter[int] = Counter()

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

    def add(self, loan: ModelLoan) -> None:
        """Hold the engine of a loan in pauses from now on."""
        with self._changed:
            self._loans.append(loan)

    def remove(self, loan: ModelLoan) -> None:
        """Forget a loan."""
        with self._changed:
            self._loans.remove(loan)

    @contextmanager
    def pause(self, loan: ModelLoan) -> Iterator[None]:
        """Hold all engines of the model; several threads may do so at once.

        Raises:
            EngineError: the engine of `loan` has ended.
        """
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_starting)
            if loan not in self._loans:
                raise EngineError("the engine has ended")
            if not self._pausing_threads:
                self._hold_all(loan)
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

    def _hold_all(self, wanted: ModelLoan) -> None:
        try:
            for loan in self._loans:
                try:
                    loan.hold()
                except EngineError:
                    if loan is wanted:
                        raise
        except BaseException:  # it has ended, or the caller was interrupted
            self._release_all()
            raise

    def _release_all(self) -> None:
        for loan in self._loans:
            if loan.is_held:
                loan.release()


_lock = threading.Lock()
_shared_models: weakref.WeakKeyDictionary[PreTrainedModel, SharedModel]
_shared_models = weakref.WeakKeyDictionary()


def shared_model(model: PreTrainedModel) -> SharedModel:
    """Return what the engines of a model share, the same object for the same model."""
    with _lock:
        return _shared_models.setdefault(model, SharedModel())


class ModelLoan:
    """The loan of a model to an engine that runs, from its start to its end but for pauses."""

    def __init__(self, model: PreTrainedModel, loop: EngineLoop) -> None:
        self.loop = loop
        self.is_held = False
        """Whether a pause holds the engine, so that it runs nothing."""
        self._model = model
        self._lock = threading.Lock()
        self._attachment = ExitStack()

    def take(self) -> None:
        """Borrow the model."""
        with self._lock:
            self._attachment.enter_context(attached(self._model))

    def give_back(self) -> None:
        """Leave the model as it was before `take`; doing it again changes nothing."""
        with self._lock:
            self._attachment.close()

    def hold(self) -> None:
        """Return once the engine runs no step and the model is given back; `release` ends this.

        Raises:
            EngineError: the engine has ended; the model is given back all the same.
        """
        try:
            self.loop.pause()
        except EngineError:
            self.give_back()
            raise
        self.give_back()
        self.is_held = True

    def release(self) -> None:
        """Take back `hold`."""
        self.is_held = False
        self.take()
        self.loop.resume()
        if self.loop.has_ended:  # it died while it was held
            self.give_back()
