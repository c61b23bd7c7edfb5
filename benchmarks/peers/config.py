"""The configuration of a comparison: a YAML file that says which peers there are and where.

A peer is a program that generates: a Python, an adapter, a model, options. Paths may begin with ~,
hold environment variables, and are relative to the file's folder. Knows no measuring.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cbgen.errors import UsageError

ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the table.

    Attributes:
        name: what the table calls it.
        adapter: file that its Python runs.
        model: what the adapter loads.
        python: the interpreter that has the peer installed.
        options: the adapter's options.
        env: environment variables for its process.
        fill_cache_first: whether the first request runs alone, before all of them; its time counts.
        workloads: names of the workloads that it runs; None = all.
    """

    name: str
    adapter: Path
    model: Path
    python: Path
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    fill_cache_first: bool = False
    workloads: tuple[str, ...] | None = None

    @property
    def missing(self) -> Path | None:
        """The first of its files that is not there."""
        files = (self.python, self.adapter, self.model)
        return next((file for file in files if not file.exists()), None)

    def runs(self, workload: str) -> bool:
        """Tell whether it is to run the workload of that name."""
        return self.workloads is None or workload in self.workloads


@dataclass(frozen=True, slots=True)
class Comparison:
    """Peers of one model.

    Attributes:
        vocab_size: token ids of the workloads are in [0, vocab_size).
        peers: in the order in which they run; ratios are to the first.
        reference: whose sequences the others' are compared with; None = no comparison.
    """

    vocab_size: int
    peers: tuple[Peer, ...]
    reference: Peer | None = None


def read_comparison(path: Path) -> Comparison:
    """Read and check the file.

    Raises:
        UsageError: it cannot be read or holds something else; the text names the place.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    fields = _mapping(content, str(path), ("vocab_size", "peers"), ("reference",))
    if not isinstance(fields["vocab_size"], int):
        raise UsageError(f"{path}: vocab_size must be a number, got {fields['vocab_size']!r}")
    peers = _mapping(fields["peers"], f"{path}: peers", (), None)
    if not peers:
        raise UsageError(f"{path}: peers: name at least one")
    reference = fields.get("reference")
    return Comparison(
        fields["vocab_size"],
        tuple(_peer(name, value, path) for name, value in peers.items()),
        None if reference is None else _peer("reference", reference, path),
    )


def _peer(name: str, value: object, path: Path) -> Peer:
    place = f"{path}: {name}"
    optional = ("python", "options", "env", "fill_cache_first", "workloads")
    fields = _mapping(value, place, ("adapter", "model"), optional)
    adapter = str(fields["adapter"])
    workloads = fields.get("workloads")
    return Peer(
        name=name,
        adapter=_path(adapter, path) if "/" in adapter else ADAPTERS / f"for_{adapter}.py",
        model=_path(fields["model"], path),
        python=_path(fields.get("python", sys.executable), path),
        options=_mapping(fields.get("options", {}), f"{place}: options", (), None),
        env={
            key: os.path.expandvars(str(text))
            for key, text in _mapping(fields.get("env", {}), f"{place}: env", (), None).items()
        },
        fill_cache_first=bool(fields.get("fill_cache_first", False)),
        workloads=None if workloads is None else tuple(workloads),
    )


def _mapping(
    value: object, place: str, required: tuple[str, ...], optional: tuple[str, ...] | None
) -> dict[str, Any]:
    """Return the value if it is a mapping with these keys; optional None = any others."""
    if not isinstance(value, dict):
        raise UsageError(f"{place}: expected keys with values, got {value!r}")
    if missing := [key for key in required if key not in value]:
        raise UsageError(f"{place}: {', '.join(missing)} is missing")
    if optional is not None and (unknown := value.keys() - {*required, *optional}):
        known = ", ".join((*required, *optional))
        raise UsageError(f"{place}: unknown keys {sorted(unknown)}; there are {known}")
    return value


def _path(text: object, file: Path) -> Path:
    expanded = os.path.expandvars(str(text))
    if "$" in expanded:
        raise UsageError(f"{file}: {text}: set this environment variable")
    # Not resolved: the interpreter of a virtual environment is a link.
    return file.absolute().parent / Path(expanded).expanduser()
