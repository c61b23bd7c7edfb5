"""What a run needs besides its recipe. Loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cbgen.io.dialects import InputFormat
from cbgen.io.inputs import Inputs
from cbgen.io.row_source import RowSource
from cbgen.io.used_files import UsedFiles
from cbgen.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the command line adds to a recipe."""

    inputs: Inputs
    """The rows to answer."""
    output: str
    """File, or `-` for stdout."""
    overwrite: bool = False
    """Replace an existing output."""
    resume: bool = False
    """Go on with an existing output."""
    resume_any: bool = False
    """Do so even if recipe or input have changed; implies `resume`."""
    retry: frozenset[str] = frozenset()
    """Finish reasons of rows to redo; implies `resume`."""
    input_format: InputFormat = "auto"
    """Which rows are lines of a batch file, and in whose dialect those are answered."""
    version: str = ""
    """Version of cbgen, to be noted beside the output."""
    strict: bool = False
    """End with UsageError at the first row that carries an error."""


def row_source(recipe: Recipe, inputs: Inputs, input_format: InputFormat) -> RowSource:
    """Return the rows of the inputs, read anew."""
    return RowSource(
        inputs.all_records(),
        on_duplicate_id=recipe.output.on_duplicate_id,
        input_format=input_format,
        shard=inputs.shard,
    )


def files_of_recipe(recipe: Recipe, path: str) -> UsedFiles:
    """Return the files that a recipe makes a command read: its own, the model's, the template."""
    files = UsedFiles()
    files.note_read(path, "the recipe")
    model = os.path.expanduser(recipe.model.path)
    files.note_read(model, "a file of the model")
    if os.path.isfile(os.path.join(model, "config.json")):  # other folders may be of any size
        files.note_folder_read(model, "a file of the model")
    template = os.path.expanduser(recipe.prompt.chat_template or "")
    if os.path.isfile(template):
        files.note_read(template, "the chat template")
    return files
