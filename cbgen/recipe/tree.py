"""The values of a recipe before they are checked, and the place that each of them came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from cbgen.errors import RecipeError
from cbgen.values import Plain, show

Path: TypeAlias = tuple[str, ...]
"""Keys from the root: ("model", "config_overrides", "sliding_window")."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given: a line of a file, a `--set`, or (all None) a Python mapping."""

    file: str | None = None
    line: int | None = None
    override: str | None = None
    """The text behind `--set`."""

    def error(self, message: str) -> RecipeError:
        """Return the error that points here; the caller raises it."""
        if self.override is not None:
            return RecipeError(f"--set {self.override}: {message}")
        return RecipeError(message, file=self.file, line=self.line)

    def __str__(self) -> str:
        if self.override is not None:
            return "command line"
        if self.file is None:
            return "recipe"
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Tree:
    """Nested mappings with the place of every key.

    Owns its values: `values` is changed in place by `put` and `pop`.
    """

    def __init__(self, values: dict[str, Any], places: dict[Path, Place], whole: Place) -> None:
        self.values = values
        self._places = places
        self._whole = whole

    def place(self, path: Path) -> Place:
        """Return the place of a key, or of the nearest key above it that has one."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self._places:
                return self._places[path[:depth]]
        return self._whole

    def section(self, name: str) -> dict[str, Any]:
        """Return the mapping of a section; a missing or empty section is an empty mapping.

        Raises:
            RecipeError: the section holds something else.
        """
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.place((name,)).error(
                f"{name}: expected a mapping of fields, got {show(value)}"
            )
        return value

    def put(self, path: Path, value: Plain, place: Place) -> None:
        """Set the value at `path`, making the mappings on the way.

        Raises:
            RecipeError: a key on the way holds something that is not a mapping.
        """
        node = self.values
        for depth, key in enumerate(path[:-1], start=1):
            if node.get(key) is None:
                node[key] = {}
                self._places[path[:depth]] = place
            node = node[key]
            if not isinstance(node, dict):
                raise place.error(f"{'.'.join(path[:depth])} is {show(node)}, which has no fields")
        self._forget(path)
        node[path[-1]] = value
        self._places[path] = place

    def pop(self, path: Path) -> Plain:
        """Remove the key at `path`, which must be there, and return its value."""
        node = self.values
        for key in path[:-1]:
            node = node[key]
        self._forget(path)
        return node.pop(path[-1])

    def rename_section(self, old: str, new: str) -> None:
        """Give a section that is there another name, and keep the places in it."""
        self.values[new] = self.values.pop(old)
        self._places = {
            (new, *path[1:]) if path[0] == old else path: place
            for path, place in self._places.items()
        }

    def _forget(self, path: Path) -> None:
        for known in [known for known in self._places if known[: len(path)] == path]:
            del self._places[known]
