"""Lays out the pages of the site: docs/, and what its pages lead to outside of docs/, all where the repository has it.

python docs/make_site.py      # into build/pages, for mkdocs.yml

So a link between files means the same in the repository and on the site. A folder that a page leads to becomes a page
with links to its files.
"""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "pages"
HOME = ROOT / "README.md"
_LINK = re.compile(r"\]\(([^)#\s]+)")


def linked(page: Path) -> set[Path]:
    """Returns the files and folders of this repository that a page leads to."""
    found = (path for path in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in path)
    return {(page.parent / path).resolve() for path in found}


def files_of_site() -> set[Path]:
    """Returns the pages of docs/, and all that is reached from them and from the README, pictures and code too.

    Raises:
        ValueError: a link leads to nothing.
    """
    found, new = set(), {HOME, *(ROOT / "docs").rglob("*.md")}
    while new:
        page = new.pop()
        found.add(page)
        if page.suffix == ".md":
            lost = [path for path in linked(page) if not path.exists()]
            if lost:
                raise ValueError(f"links of {page.name} must lead to files, got {lost[0]}; correct the link")
            new |= linked(page) - found
    return found


def folder_page(folder: Path) -> str:
    """Returns a page with the files of a folder, which the site holds as well."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return "\n".join([f"# {folder.relative_to(ROOT)}/", "", *(f"* [{name}]({name})" for name in names), ""])


def main(out: Path = OUT) -> None:
    """Writes the pages afresh.

    Args:
        out: the folder.
    """
    shutil.rmtree(out, ignore_errors=True)
    for path in sorted(files_of_site()):
        target = out / path.relative_to(ROOT)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            (target / "index.md").write_text(folder_page(path), encoding="utf-8")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


if __name__ == "__main__":
    main()
