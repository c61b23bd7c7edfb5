"""`cbgen init` and `cbgen schema`: a recipe to start from, and the JSON Schema of recipes."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from cbgen.errors import UsageError
from cbgen.recipe.describe import recipe_json_schema, starter_recipe


def init_command(
    path: Annotated[
        str, typer.Argument(metavar="RECIPE", help="File to write; - is stdout.")
    ] = "recipe.yaml",
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
) -> None:
    """Write a commented recipe to start from."""
    if path == "-":
        sys.stdout.write(starter_recipe())
        return
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as stream:
            stream.write(starter_recipe())
    except FileExistsError as error:
        raise UsageError(f"{path} exists; give another name, or --force") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}", err=True)


def schema_command() -> None:
    """Print the JSON Schema of recipes, for editors."""
    sys.stdout.write(json.dumps(recipe_json_schema(), indent=2) + "\n")
