"""The page of known complaints names tests that exist, one at least in every row."""

from __future__ import annotations

import ast
import re

from tests.helpers.sources import ROOT, syntax_tree

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def table_rows() -> list[str]:
    """Return the rows of all tables, without their heads."""
    text = (ROOT / "docs" / "known-complaints.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return "".join(tables).splitlines()


def test_every_complaint_names_a_test_or_why_it_does_not_apply():
    rows = table_rows()
    assert len(rows) > 40
    assert [row for row in rows if not NAMED_TEST.search(row) and "not yet: " not in row] == []


def test_every_test_that_the_page_names_exists():
    named = {match for row in table_rows() for match in NAMED_TEST.findall(row)}
    existing = {
        (path, node.name)
        for path in {path for path, _ in named}
        if (ROOT / path).is_file()
        for node in syntax_tree(ROOT / path).body
        if isinstance(node, ast.FunctionDef)
    }
    assert named - existing == set()
