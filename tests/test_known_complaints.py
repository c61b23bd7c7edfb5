"""The page of known complaints names tests that exist, at least one for every complaint."""

from __future__ import annotations

import ast
import re

from tests.helpers.sources import ROOT, syntax_tree

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def complaints() -> list[str]:
    """Return the text of every complaint: what went wrong, what cbgen does, and the tests."""
    text = (ROOT / "docs" / "known-complaints.md").read_text(encoding="utf-8")
    return re.findall(r"^- \*\*.*\n(?: +.*\n)*", text, re.MULTILINE)


def test_every_complaint_names_a_test_or_why_it_does_not_apply():
    found = complaints()
    assert len(found) > 40
    assert [text for text in found if not NAMED_TEST.search(text) and "not yet: " not in text] == []


def test_every_test_that_the_page_names_exists():
    named = {match for text in complaints() for match in NAMED_TEST.findall(text)}
    existing = {
        (path, node.name)
        for path in {path for path, _ in named}
        if (ROOT / path).is_file()
        for node in syntax_tree(ROOT / path).body
        if isinstance(node, ast.FunctionDef)
    }
    assert named - existing == set()
