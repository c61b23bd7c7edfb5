"""YAML text to a `Tree`: plain values, and the place that each key was given at.

The types are those of the core schema of YAML 1.2: `no` is text, `1e-4` a number and `010` is 10,
where YAML 1.1 has false, text and 8. Knows nothing of the fields of a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from cbgen.errors import RecipeError
from cbgen.values import Plain, refuse_unwritable, show

Path: TypeAlias = tuple[str, ...]
"""Keys from the root: ("model", "config_overrides", "sliding_window")."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given: a line of a file, a `--set`, or (all None) a Python mapping."""

    file: str | None = None
    line: int | None = None
    override: str | None = None
    """The text behind `--set`."""

    def at_line(self, line: int | None) -> Place:
        """Return the place of a line of the text that this place holds."""
        return self if self.override is not None else Place(self.file, line)

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


@dataclass(slots=True)
class Tree:
    """A recipe as it was given: nested mappings, and the places of sections and their fields."""

    values: dict[str, Any]
    places: dict[Path, Place]
    """By section, or by section and field."""
    whole: Place

    def place(self, path: Path) -> Place:
        """Return the place of a section or field, or of the nearest thing above that has one."""
        return self.places.get(path) or self.places.get(path[:1]) or self.whole

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
                self.places[path[:depth]] = place
            node = node[key]
            if not isinstance(node, dict):
                raise place.error(f"{'.'.join(path[:depth])} is {show(node)}, which has no fields")
        node[path[-1]] = value
        self.places[path] = place


_TAG = "tag:yaml.org,2002:"
_MOST_NODES = 100_000
"""Values that a document may hold, aliases counted each time, so that they cannot explode."""
_DEEPEST = 50
_MOST_DIGITS = 400
"""Digits of an integer; Python neither reads nor shows integers of many thousands."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the implicit types of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (the base class declares it; an empty one drops 1.1)


_PLAIN_TYPES = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
for _name, (_pattern, _first) in _PLAIN_TYPES.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_recipe_file(path: str) -> Tree:
    """Read a YAML file.

    Raises:
        RecipeError: the file cannot be read, is not UTF-8, not YAML, or not one mapping.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RecipeError(f"cannot read the recipe: {reason}", file=path) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        raise RecipeError(message, file=path, line=line) from error
    return parse_recipe_text(text, path)


def parse_recipe_text(text: str, file: str) -> Tree:
    """Parse the text of a recipe; `file` is named in errors and places.

    Raises:
        RecipeError: the text is not YAML, empty, not one mapping, or repeats a key.
    """
    whole = Place(file=file)
    node = _compose(text, whole)
    if node is None:
        raise whole.error("the recipe is empty; `cbgen init` writes one to start from")
    builder = _Builder(whole)
    values = builder.build(node)
    if not isinstance(node, yaml.MappingNode):
        raise whole.at_line(_line(node)).error(
            f"expected a mapping of sections (model, prompt, ...), got {show(values)}"
        )
    places: dict[Path, Place] = {}
    for name, (key, section) in builder.pairs(node).items():
        places[name,] = whole.at_line(_line(key))
        if isinstance(section, yaml.MappingNode):
            for field, (field_key, _) in builder.pairs(section).items():
                places[name, field] = whole.at_line(_line(field_key))
    return Tree(values, places, whole)


def parse_value(text: str, place: Place) -> Plain:
    """Parse the value of one override; errors point to `place`.

    Raises:
        RecipeError: the text is not YAML.
    """
    node = _compose(text, place)
    return None if node is None else _Builder(place).build(node)


def _compose(text: str, place: Place) -> yaml.Node | None:
    reached = 1
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            reached = loader.line + 1
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise place.at_line(line).error(_syntax_message(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: {error.reason} (#x{error.character:04x})"
        raise place.at_line(line).error(message) from error
    except RecursionError as error:
        message = "not valid YAML for a recipe: nested too deep"
        raise place.at_line(reached).error(message) from error


def _syntax_message(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be parsed"
    message = "not valid YAML: " + (f"{error.context}, {problem}" if error.context else problem)
    if "another document" in problem:
        return "several YAML documents (---) in one file; a recipe is one"
    if "'\\t'" in problem:
        return message + "; tabs cannot indent YAML, use spaces"
    if "mapping values are not allowed" in problem:
        return message + "; put text that holds `: ` in quotes"
    return message


class _Builder:
    """Turns the nodes of one document into plain values; errors point to lines of `whole`."""

    def __init__(self, whole: Place) -> None:
        self._whole = whole
        self._open: set[int] = set()
        self._nodes = 0

    def build(self, node: yaml.Node) -> Plain:
        """Return the value of a node."""
        with self._entered(node):
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return {key: self.build(value) for key, (_, value) in self.pairs(node).items()}
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self.build(item) for item in node.value]
            if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
                return self._scalar(node)
        raise self._error(node, f"a recipe cannot hold the tag {_tag(node)}")

    def _scalar(self, node: yaml.ScalarNode) -> Plain:
        try:
            value = _SCALARS[node.tag](node.value)
        except ValueError as error:
            message = f"{show(node.value)} is not a value of the tag {_tag(node)}"
            raise self._error(node, message) from error
        self._refuse_unwritable(node, value)
        return value

    def _refuse_unwritable(self, node: yaml.Node, value: Plain) -> None:
        try:
            refuse_unwritable(value)
        except ValueError as error:
            raise self._error(node, str(error)) from None

    def pairs(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return key and value nodes by key; the mapping's own keys win over those of `<<`."""
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                several = isinstance(value_node, yaml.SequenceNode)
                merged.extend(value_node.value if several else [value_node])
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be text, not a list or a mapping")
            self._refuse_unwritable(key_node, key_node.value)
            if key_node.value in pairs:
                first = _line(pairs[key_node.value][0])
                raise self._error(
                    key_node, f"the key {key_node.value} is given twice (first: line {first})"
                )
            pairs[key_node.value] = (key_node, value_node)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                raise self._error(source, "`<<` takes a mapping or a list of mappings")
            with self._entered(source):
                for key, pair in self.pairs(source).items():
                    pairs.setdefault(key, pair)
        return pairs

    @contextmanager
    def _entered(self, node: yaml.Node) -> Iterator[None]:
        self._nodes += 1
        if id(node) in self._open:
            raise self._error(node, "an alias (*) stands inside its own anchor (&)")
        if self._nodes > _MOST_NODES:
            raise self._error(node, f"more than {_MOST_NODES} values, aliases counted each time")
        if len(self._open) == _DEEPEST:
            raise self._error(node, f"nested more than {_DEEPEST} levels deep")
        self._open.add(id(node))
        yield
        self._open.discard(id(node))

    def _error(self, node: yaml.Node, message: str) -> RecipeError:
        return self._whole.at_line(_line(node)).error(message)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _tag(node: yaml.Node) -> str:
    return str(node.tag).replace(_TAG, "!!")


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("too many digits")
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return text.lower() == "true"


_SCALARS: dict[str, Callable[[str], Any]] = {
    _TAG + "str": str,
    _TAG + "null": lambda text: None,
    _TAG + "bool": _boolean,
    _TAG + "int": _integer,
    _TAG + "float": _float,
}
