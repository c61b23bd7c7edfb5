"""A model on loan: evaluated and hooked while an engine runs it, else exactly as it was."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cbgen.engine.model.attach import attached


@dataclass(slots=True)
class _Evaluation:
    """Modules that were in training mode when the first borrower came."""

    modules: list[torch.nn.Module]
    num_users: int = 0


_lock = threading.Lock()
_evaluations: dict[int, _Evaluation] = {}


class LentModel:
    """One borrower of a model; several may borrow the same one. Starts without holding it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._changing = threading.Lock()
        self._stack: ExitStack | None = None

    def take(self) -> None:
        """Put the model into evaluation mode and route its attention through the hook."""
        with self._changing, ExitStack() as stack:
            if self._stack is None:
                _evaluate(self._model)
                stack.callback(_stop_evaluating, self._model)
                stack.enter_context(attached(self._model))
                self._stack = stack.pop_all()

    def give_back(self) -> None:
        """Leave the model as it was before `take`; doing it again changes nothing."""
        with self._changing:
            stack, self._stack = self._stack, None
            if stack is not None:
                stack.close()


def _evaluate(model: PreTrainedModel) -> None:
    with _lock:
        evaluation = _evaluations.get(id(model))
        if evaluation is None:
            training = [module for module in model.modules() if module.training]
            evaluation = _evaluations[id(model)] = _Evaluation(training)
            for module in training:
                module.training = False
        evaluation.num_users += 1


def _stop_evaluating(model: PreTrainedModel) -> None:
    with _lock:
        evaluation = _evaluations[id(model)]
        evaluation.num_users -= 1
        if evaluation.num_users == 0:
            del _evaluations[id(model)]
            for module in evaluation.modules:
                module.training = True
