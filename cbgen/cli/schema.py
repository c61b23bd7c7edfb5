"""`cbgen schema`: the JSON Schema of recipes on stdout."""

from __future__ import annotations

import json
import sys

from cbgen.recipe.describe import recipe_json_schema


def schema_command() -> None:
    """Print the JSON Schema of recipes, for editors."""
    sys.stdout.write(json.dumps(recipe_json_schema(), indent=2) + "\n")
