"""README and docs: the snippet runs, commands and options exist, printed output is today's, links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import readme
from bench.blocks import FIGURES, read_block
from sppo_jax.cli import main

ROOT = Path(__file__).parents[1]
READMES = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md")]
PAGES = sorted({*READMES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")})
DOCS, CODE, RECORDS = ROOT / "docs", ("bench", "launch", "studies"), ROOT / "bench" / "results" / "records.md"
# What came after the limit was set, a page or what was added to one, and its words: they raise the limit by as many.
LATER: dict[str, int] = {
    "check.md": 400,
    "docs/start/, a machine is checked first": 140,
    "docs/first_gpu.md, the first ten minutes": 160,
    "docs/reliability.md, what a later version reads": 145,
    "CONTRIBUTING.md, make docs, make dist, a release": 70,
    "learn/from-256-to-2048-tokens.md": 900,
    "docs/plan.md, a plan for an evaluation": 200,
    "evaluate.md": 500,
    "docs/, links to evaluate.md": 60,
    "docs/report.md, the gain by context": 130,
}
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)")
# Code, configs and scripts, whose comments and messages name pages.
SOURCES = [
    *(path for ends in ("py", "yaml", "toml", "sh", "sbatch") for path in ROOT.glob(f"*/**/*.{ends}")),
    *(ROOT / name for name in ("Makefile", "Dockerfile", "pyproject.toml", "setup.py")),
]
MENTION = re.compile(r"\b(?:docs|launch|bench|studies|examples|configs)/[a-z0-9_./-]*\.(?:md|svg|png|yaml)\b")
START = sorted((ROOT / "docs" / "start").glob("*.md"))
# A command of a start page: a prefix of the environment, the program and its words.
COMMAND = re.compile(r"^(?:\$ )?(sppo|launch/[a-z_.]+|sbatch|sky|kubectl)((?: .*)?)$", re.MULTILINE)
AGAIN = "write it again: python -m bench.readme"


def options_of(command: str, capsys) -> set[str]:
    """Returns the options that the help of a command names."""
    for words in ([command], ["convert", "to-hf"], ["convert", "from-hf"])[: 3 if command == "convert" else 1]:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
    return options_in(capsys.readouterr().out) - {"--help"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that a page has: of its headings, as GitHub makes them, and those written by hand."""
    text = page.read_text(encoding="utf-8")
    heads = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    made = {re.sub(r"[^a-z0-9 _-]", "", head.lower()).replace(" ", "-") for head in heads}
    return made | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link[0]]
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor[1:] in anchors_of(target), f"{path}{anchor}"


def test_pages_that_code_and_messages_name_exist():
    for source in SOURCES:
        if any(part.startswith(".") or part == "results" for part in source.relative_to(ROOT).parts):
            continue
        names = MENTION.findall(source.read_text(encoding="utf-8"))
        assert [name for name in names if not (ROOT / name).exists()] == [], source


def test_every_page_is_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = (page.parent / path for path, _ in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in path)
        new |= {link.resolve() for link in links if link.suffix == ".md"} - reached
    assert [page for page in PAGES if page.resolve() not in reached] == []


def test_every_picture_is_on_a_page():
    pages = {page: LINK.findall(page.read_text(encoding="utf-8")) for page in PAGES}
    shown = {(page.parent / path).resolve() for page, links in pages.items() for path, _ in links}
    pictures = {
        path for folder in ("docs", "bench") for end in ("svg", "png") for path in ROOT.glob(f"{folder}/**/*.{end}")
    }
    assert pictures and pictures <= shown, pictures - shown


def words_by_hand(page: Path) -> int:
    """Returns the words of a page outside of its generated blocks."""
    return len(re.sub(r"<!-- begin .*?<!-- end [^>]*>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).split())


def test_pages_are_as_short_as_they_are_meant_to_be():
    """Counts words outside generated blocks: README, CONTRIBUTING, docs/ but api.md and config.md; the log apart."""
    generated = {DOCS / "api.md", DOCS / "config.md"}
    log = {page for page in PAGES if page.is_relative_to(DOCS / "log")}
    beside = {page for page in PAGES if page.parent.name in CODE} | {*FIGURES.glob("*.md"), RECORDS}
    main = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")} - generated - log
    assert len(README.split()) <= 700 and (DOCS / "design.md").stat().st_size <= 20_000
    assert all(words_by_hand(DOCS / name) <= most for name, most in LATER.items() if (DOCS / name).exists())
    for what, pages, most in (
        ("README, CONTRIBUTING and docs/", main, 26_000 + sum(LATER.values())),
        ("docs/log/", log, 20_000),
        ("pages beside code", beside, 11_500),
    ):
        words = sum(map(words_by_hand, pages))
        assert words <= most, f"{what} must have at most {most:,} words by hand, got {words:,}; shorten, or use LATER"


def sentences_of(page: Path) -> set[str]:
    """Returns the sentences of 12 words or more of a page, outside of code and generated blocks, as words."""
    text = re.sub(r"<!-- begin .*?<!-- end [^>]*>|```.*?```", "\n\n", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    pieces = re.split(r"(?<=[.!?])\s|\n\n|\n\* |\n#", text)
    found = (" ".join(re.findall(r"[\w./:=-]+", piece.lower())) for piece in pieces)
    return {sentence for sentence in found if len(sentence.split()) >= 12}


def test_readme_and_start_pages_share_no_sentence():
    pages = [ROOT / "README.md", *START]
    for number, page in enumerate(pages):
        for other in pages[number + 1 :]:
            assert sentences_of(page) & sentences_of(other) == set(), (page.name, other.name)
    assert all(len(sentences_of(page)) > 5 for page in pages)


def test_the_snippet_runs_as_printed(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = snippet + "\nprint(float(loss), len(jax.tree.leaves(grads)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    loss, count = done.stdout.split()[-2:]
    assert 5 < float(loss) < 6.5 and int(count) > 5  # about ln 256


@pytest.mark.parametrize(("page", "name"), sorted(readme.BLOCKS))
def test_printed_output_is_what_the_command_prints_today(page, name):
    # Python's versions break the lines of --help in other places.
    assert read_block(ROOT / page, name).split() == readme.BLOCKS[page, name]().split(), AGAIN


@pytest.mark.parametrize("path", sorted(readme.PICTURES))
def test_pictures_of_schedules_are_todays(path):
    assert (ROOT / path).read_text(encoding="ascii") == readme.picture(path), AGAIN


def test_the_printed_command_prints_it(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # data in the cache would add a row of its documents
    printed = next(block for block in readme.PRINTED if block.page == "docs/start/tpu-pod.md")
    assert main(printed.command.split()[1:]) == 0
    assert capsys.readouterr().out.startswith("\n".join(printed.text().splitlines()[2:-2]))


@pytest.mark.parametrize("page", START, ids=lambda page: page.stem)
def test_commands_of_a_start_page_exist(page, capsys):
    text = page.read_text(encoding="utf-8")
    commands = COMMAND.findall(text)
    assert len(commands) >= 3 and "## Three likely failures" in text and "## What to read in the report" in text
    for program, words in commands:
        assert all((ROOT / path).exists() for path in re.findall(r"(?:configs|launch)/\S+\.(?:yaml|sbatch)", words))
        if program == "sppo":
            command, _, rest = words.strip().partition(" ")
            assert options_in(rest) <= options_of(command, capsys), words
        elif program.startswith("launch/"):
            assert (ROOT / program).exists()


@pytest.mark.parametrize("page", START, ids=lambda page: page.stem)
def test_messages_that_a_start_page_quotes_are_in_the_code(page):
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "sppo_jax").rglob("*.py"))
    code = re.sub(r"\{[^{}]*\}", "#", code)  # what a message fills in
    failures = page.read_text(encoding="utf-8").partition("## Three likely failures")[2]
    assert failures.count("\n* **") == 3
    for quoted in re.findall(r"^\* \*\*`([^`]+)`", failures, re.MULTILINE):
        start = re.sub(r"\d+", "#", quoted).removesuffix("...").strip()
        assert start in re.sub(r"\d+", "#", code), quoted


def test_commands_of_the_readme_have_configs_and_options_that_exist(capsys):
    commands = re.findall(r"^(?:\$ )?sppo ([a-z-]+) +(.*)$", README, re.MULTILINE)
    assert {command for command, _ in commands} == {"plan", "train", "convert"}
    for command, words in commands:
        assert all((ROOT / path).exists() for path in re.findall(r"configs/\S+\.yaml", words))
        assert options_in(words) <= options_of(command, capsys)
