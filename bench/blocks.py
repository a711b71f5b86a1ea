"""Generated blocks of a Markdown file: each lies between two marks, and a command writes and rewrites it."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "bench" / "results" / "figures"  # one page for each block of `bench.validation`


def read_block(path: str | Path, name: str) -> str:
    """Returns the text between the marks of a block.

    Raises:
        ValueError: the file has no such block.
    """
    text = Path(path).read_text(encoding="utf-8")
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"{path} must have a block {name!r}, got none: write the block with its command")
    return text.partition(begin)[2].partition(end)[0]


def write_block(path: str | Path, name: str, text: str) -> None:
    """Puts text between the marks `<!-- begin NAME -->` and `<!-- end NAME -->` of a file, and leaves the rest alone.

    A file without the marks gets them at its end; a file that is not there is made.

    Args:
        path: the Markdown file.
        name: the name in the marks.
        text: the new text between the marks.

    Raises:
        ValueError: the file has one of the marks without the other, in the wrong order, or twice.
    """
    path = Path(path)
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    block = f"{begin}\n{text.strip()}\n{end}"
    counts = old.count(begin), old.count(end)
    if counts == (0, 0):
        gap = "\n\n" if old.strip() else ""
        path.write_text(f"{old.rstrip()}{gap}{block}\n", encoding="utf-8")
        return
    if counts != (1, 1) or old.index(begin) > old.index(end):
        raise ValueError(f"{path} must have {begin} once and {end} once after it, got {counts}: restore the marks")
    before, _, tail = old.partition(begin)
    after = tail.partition(end)[2]
    path.write_text(before + block + after, encoding="utf-8")


def print_block(
    path: Path, name: str, make: Callable[[], str], about: str, arguments: Sequence[str] | None = None
) -> int:
    """Runs a script that prints one block of a page, and with `--write` writes the block.

    Args:
        path: the page.
        name: the block's.
        make: returns the text.
        about: the script's docstring, whose first line is its help.
        arguments: words of the command line; None: those of the process.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write the block `{name}` of {path.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    text = make()
    print(text)
    if args.write:
        write_block(path, name, text)
    return 0
