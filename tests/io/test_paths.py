from __future__ import annotations

import pytest

from cbgen.errors import UsageError
from cbgen.io.inputs import find_inputs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the named files in it."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}\n")
        return tmp_path

    return make


def test_wildcards_give_files_in_natural_order(folder):
    folder("part-10.jsonl", "part-2.jsonl", "part-1.jsonl", "part-02.jsonl", "other.txt")
    assert find_inputs(["part-*.jsonl"]) == (
        "part-1.jsonl",
        "part-02.jsonl",
        "part-2.jsonl",
        "part-10.jsonl",
    )


def test_names_of_every_form_can_be_sorted(folder):
    folder("1", "a", "a1", "1a", "10", "a.b", "é")
    assert find_inputs(["*"]) == ("1", "1a", "10", "a", "a1", "a.b", "é")


def test_several_inputs_keep_their_order(folder):
    folder("b1.jsonl", "b2.jsonl", "a.jsonl")
    assert find_inputs(["b*.jsonl", "a.jsonl"]) == ("b1.jsonl", "b2.jsonl", "a.jsonl")


def test_two_stars_reach_into_folders(folder):
    folder("a/x.jsonl", "a/b/y.jsonl", "z.jsonl")
    assert set(find_inputs(["**/*.jsonl"])) == {"a/x.jsonl", "a/b/y.jsonl", "z.jsonl"}


def test_a_file_whose_name_holds_wildcards_is_meant_itself(folder):
    folder("rows[1].jsonl", "rows1.jsonl")
    assert find_inputs(["rows[1].jsonl"]) == ("rows[1].jsonl",)


def test_a_pattern_without_a_match_is_refused(folder):
    folder("a.jsonl")
    with pytest.raises(UsageError, match=r"^\*\.gz: matches no file"):
        find_inputs(["a.jsonl", "*.gz"])


def test_a_name_without_wildcards_is_left_to_whoever_opens_it(folder):
    folder()
    assert find_inputs(["missing.jsonl"]) == ("missing.jsonl",)


@pytest.mark.parametrize("pattern", ["data", "*"])
def test_a_folder_is_refused_with_the_remedy(folder, pattern):
    folder("data/a.jsonl")
    with pytest.raises(UsageError, match=r"data: is a folder; .*'data/\*\.jsonl'"):
        find_inputs([pattern])


def test_a_file_that_is_given_twice_is_refused(folder):
    folder("a.jsonl", "b.jsonl")
    with pytest.raises(UsageError, match=r"a\.jsonl: is given twice; each row"):
        find_inputs(["*.jsonl", "a.jsonl"])


def test_a_file_that_is_given_under_two_names_is_refused(folder):
    folder("a.jsonl").joinpath("link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(UsageError, match=r"link\.jsonl: .*the same file as a\.jsonl"):
        find_inputs(["*.jsonl"])


def test_stdin_cannot_be_given_twice():
    with pytest.raises(UsageError, match="-: is given twice"):
        find_inputs(["-", "-"])


def test_a_file_address_is_the_file(folder):
    path = folder("a b#1.jsonl") / "a b#1.jsonl"
    assert find_inputs([path.as_uri()]) == (str(path),)
    assert find_inputs([f"file://{path.parent}/a*.jsonl"]) == (str(path),)


def test_a_file_address_on_another_machine_is_refused():
    with pytest.raises(UsageError, match="names a file on server"):
        find_inputs(["file://server/a.jsonl"])
