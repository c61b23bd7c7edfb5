"""Every error that cbgen raises on purpose, and what each means for the process and for one row.

    CbgenError
    ├── UsageError       the user can mend it: recipe, options, files, model (exit 2)
    │   └── RecipeError  a place in a recipe: file, line, value, nearest known name
    ├── EngineError      the engine failed: out of memory, a model that raises (exit 3)
    ├── StoppedEarly     the run was asked to end before its input did (exit 4, 130, 143)
    ├── OutputError      the output cannot be written: full disk, read-only folder (exit 3)
    └── RowError         one row cannot be answered; it becomes that row's `error`

A message holds the value, the place and the remedy. This module imports nothing of cbgen.
"""

from __future__ import annotations


class CbgenError(Exception):
    """Base of all errors that cbgen raises on purpose."""


class UsageError(CbgenError):
    """Something the user gave is wrong: recipe, option, file or model. Nothing was generated.

    Args:
        message: the value and the remedy.
        key: the setting of the recipe that is wrong, such as `model.device`, where the place that
            finds it knows no file; `Recipe.placing_errors` adds the file and line.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class RecipeError(UsageError):
    """A recipe is wrong at a known place.

    The text of the exception is `file:line: message`, or `message` alone where no file is known.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        self.message = message
        self.file = file
        self.line = line
        place = "" if file is None else f"{file}: " if line is None else f"{file}:{line}: "
        super().__init__(place + message)


class EngineError(CbgenError):
    """The engine failed and cannot go on; rows that were finished before stay valid."""


class StoppedEarly(CbgenError):
    """The run ended before its input did, as it was asked to; rows that finished are written."""


class OutputError(CbgenError):
    """The output cannot be written any more; what was flushed before stays valid."""


class RowError(CbgenError):
    """One row cannot be answered.

    Attributes:
        type: whose fault it is: `invalid_row` (the input line), `invalid_request` (its meaning for
            this model), `engine_error`.
        code: a stable snake_case word for scripts, such as `invalid_json` or `prompt_too_long`.
        message: the value, the place and the remedy, for people.
    """

    def __init__(self, code: str, message: str, *, type: str = "invalid_row") -> None:
        super().__init__(message)
        self.type = type
        self.code = code
        self.message = message

    def as_dict(self) -> dict[str, str]:
        """Return the `error` object of the output row."""
        return {"type": self.type, "code": self.code, "message": self.message}

    def forget_frames(self) -> None:
        """Let go of where it was raised: an error that is kept would keep the rows there alive."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
