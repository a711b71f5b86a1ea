"""Generated blocks of a Markdown file: made, replaced, and never mixed up."""

import pytest

from bench.blocks import write_block


def test_a_block_is_made_then_replaced_and_the_rest_stays(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# Title\n\nWords.\n")
    write_block(path, "a", "one")
    write_block(path, "b", "two\n")
    path.write_text(path.read_text() + "\nMore words.\n")
    write_block(path, "a", "three\n\nfour")
    assert path.read_text() == (
        "# Title\n\nWords.\n\n<!-- begin a -->\nthree\n\nfour\n<!-- end a -->\n\n"
        "<!-- begin b -->\ntwo\n<!-- end b -->\n\nMore words.\n"
    )


def test_a_missing_file_is_made(tmp_path):
    write_block(tmp_path / "new.md", "a", "one")
    assert (tmp_path / "new.md").read_text() == "<!-- begin a -->\none\n<!-- end a -->\n"


@pytest.mark.parametrize(
    "text",
    ["<!-- begin a -->\n", "<!-- end a -->\n<!-- begin a -->\n", "<!-- begin a --><!-- end a -->" * 2],
)
def test_broken_marks_are_refused_and_nothing_is_written(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="restore the marks"):
        write_block(path, "a", "one")
    assert path.read_text() == text
