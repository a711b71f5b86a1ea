"""The site: every page is in the menu; what `make docs` builds has no broken link, no lost picture, a full index."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
make_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_site)
RECORDS = ("bench/", "studies/", "docs/log/", "docs/evidence.md", "docs/first_gpu.md", "docs/recall.md")


def leaves(menu) -> list[str]:
    """Returns the pages of a menu, in its order."""
    if isinstance(menu, str):
        return [menu]
    return [page for item in (menu.values() if isinstance(menu, dict) else menu) for page in leaves(item)]


class Page(HTMLParser):
    """What a built page leads to and shows, its anchors, and its text by the tag around it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.anchors: set[str] = set()
        self.colors: set[str] = set()
        self.paragraphs: list[str] = []
        self._within = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self.colors |= {given["data-md-color-scheme"]} if given.get("data-md-color-scheme") else set()
        if given.get("href"):
            self.links.append(given["href"])
        if given.get("src"):
            self.pictures.append(given["src"])
        self._within = tag == "p"
        if self._within:
            self.paragraphs.append("")

    def handle_data(self, data):
        if self._within:
            self.paragraphs[-1] += data

    def handle_endtag(self, tag):
        self._within = False


def broken(site: Path) -> tuple[int, list[str]]:
    """Returns how many links and pictures within a site its pages have, and those that lead nowhere."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    count, lost = 0, []
    for path, page in pages.items():
        for link in page.links + page.pictures:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            start = site if parts.path.startswith("/") else path.parent
            target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                lost.append(f"{path.relative_to(site.resolve())}: {link}")
    return count, lost


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site."""
    beside = Path(sys.executable).parent / "zensical"
    builder = str(beside) if beside.exists() else shutil.which("zensical")
    if builder is None:
        pytest.skip("zensical is not installed; pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    make_site.main(folder / "pages")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    text = text.replace(f"docs_dir: {SITE['docs_dir']}", "docs_dir: pages").replace(
        f"site_dir: {SITE['site_dir']}", "site_dir: site"
    )
    (folder / "mkdocs.yml").write_text(text, encoding="utf-8")
    run = (builder, "build", "--strict", "--clean")
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "No issues found" in done.stdout + done.stderr, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_in_the_menu_once():
    pages = {path.relative_to(ROOT).as_posix() for path in make_site.files_of_site() if path.suffix == ".md"}
    listed = leaves(SITE["nav"])
    assert set(listed) == pages, f"list it in mkdocs.yml: {set(listed) ^ pages}"
    assert len(listed) == len(set(listed))


def test_pages_of_readers_and_records_are_apart():
    menu = {name: leaves(part) for item in SITE["nav"] for name, part in item.items()}
    assert list(menu)[-1] == "Records" and all(page.startswith(RECORDS) for page in menu.pop("Records"))
    assert [page for part in menu.values() for page in part if page.startswith(RECORDS)] == []


def test_a_page_that_leads_out_of_docs_leads_to_a_file_of_the_site():
    files = make_site.files_of_site()
    out = {path for page in (ROOT / "docs").rglob("*.md") for path in make_site.linked(page)}
    out = {path for path in out if not path.is_relative_to(ROOT / "docs")}
    assert len(out) >= 10 and out <= files
    assert ROOT / "docs" / "learn" / "chunks.svg" in files and ROOT / "CONTRIBUTING.md" in files


def test_a_page_that_leads_nowhere_is_named(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[a](docs/" + "a.md)")
    (tmp_path / "docs" / "a.md").write_text("[b](gone.md) [c](https://example.com/)")
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    monkeypatch.setattr(make_site, "HOME", tmp_path / "README.md")
    with pytest.raises(ValueError, match=r"links of a\.md must lead to files, got .*gone\.md; correct the link"):
        make_site.files_of_site()


def test_a_broken_site_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">x</a><a href="a/#gone">x</a><a href="/b/">x</a><img src="c.svg">'
    )
    (tmp_path / "a" / "index.html").write_text(
        '<h2 id="here">y</h2><a href="..">x</a><a href="https://example.com/">x</a>'
    )
    assert broken(tmp_path) == (5, ["index.html: a/#gone", "index.html: /b/", "index.html: c.svg"])


def test_links_and_pictures_of_the_built_site_lead_somewhere(site):
    count, lost = broken(site)
    assert lost == [] and count > 3000
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    for page in leaves(SITE["nav"]):
        place = re.sub(r"(README|index)\.md$", "", page).removesuffix(".md").rstrip("/")
        assert (f"{place}/index.html" if place else "index.html") in built


def test_the_built_site_shows_or_names_every_picture(site):
    led = ((path, page.pictures + page.links) for path in site.rglob("*.html") for page in [Page(path)])
    shown = {(path.parent / unquote(link)).resolve() for path, links in led for link in links if "://" not in link}
    wanted = {
        (site / path.relative_to(ROOT)).resolve()
        for path in make_site.files_of_site()
        if path.suffix in (".svg", ".png")
    }
    assert len(wanted) >= 10 and wanted <= shown


def test_lists_and_tables_are_built_as_such(site):
    for path in site.rglob("*.html"):
        for text in Page(path).paragraphs:
            assert not re.search(r"^(\* |- |\d\. |\|)", text, re.MULTILINE), (path, text[:200])


def test_the_index_has_the_text_of_every_page(site):
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    words: dict[str, str] = {}
    for item in items:
        place = item["location"].partition("#")[0]
        words[place] = f"{words.get(place, '')} {item['title']} {item['text']}"
    places = {path.parent.relative_to(site).as_posix() + "/" for path in site.rglob("index.html")}
    assert {place or "./" for place in words} == places
    assert min(len(text.split()) for text in words.values()) >= 20
    assert "schema_version" in words["docs/reliability/"] and "causal MFU" in words["docs/plan/"]


def test_a_reader_chooses_light_or_dark(site):
    assert Page(site / "index.html").colors == {"default", "slate"}
