"""Generated parts of a Markdown file: each stands between two marks and is written anew by the command that made it."""

from pathlib import Path


def write_block(path: str | Path, name: str, text: str) -> None:
    """Puts text between the marks `<!-- begin NAME -->` and `<!-- end NAME -->` of a file, and leaves the rest alone.

    A file without the marks gets them at its end; a file that is not there is made.

    Args:
        path: the Markdown file.
        name: what the marks are called.
        text: what stands between them from now on.

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
        raise ValueError(f"{path} must have {begin} once and {end} once after it, got {counts}: mend the marks")
    before, _, tail = old.partition(begin)
    after = tail.partition(end)[2]
    path.write_text(before + block + after, encoding="utf-8")
