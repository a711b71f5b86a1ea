"""Names: a class has its name to itself, and a name that a sentence mentions leads somewhere."""

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sppo_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Names of two classes. The list may only shrink: give a new class another name.
TWICE = {
    "Asked",
    "Board",
    "Bucket",
    "Change",
    "Cut",
    "Figures",
    "Memory",
    "Output",
    "Progress",
    "Sizes",
    "Trial",
    "_Blocks",
}
# How often the package may say `kind`, a word for anything. The number may only fall: a new meaning has a word of its
# own, such as op, layer type, split or content.
MOST_KINDS = 130
# Names of others: of jax, and of keys in plan.json.
_OTHERS_KINDS = {"device_kind", "memory_kind", "_memory_kind", "with_memory_kind", "sequence_kind"}
_DOTTED = re.compile(r"`((?:sppo_jax\.)?[a-z_]+(?:\.\w+)+)(?:\(.*?\))?`")
_PATH = re.compile(r"`((?:sppo_jax/)?[a-z_]+/(?:\w+/)*\w+\.py)`")


def classes() -> dict[str, list[str]]:
    """Returns the files of each class of the package that stands at the top of a module."""
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_a_class_has_its_name_to_itself():
    several = {name: paths for name, paths in classes().items() if len(paths) > 1}
    assert all(len(paths) == 2 for paths in several.values()), several
    assert set(several) == TWICE, {name: several.get(name) for name in set(several) ^ TWICE}
    assert len(TWICE) <= 15


def kinds_in(text: str) -> int:
    """Returns how often a module says `kind` or `kinds`: as a part of a name between underscores or capitals, or as a
    word of a comment or of any text in quotes. A text that is no more than `"kind"` is a key of JSON and not counted.
    """
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string not in _OTHERS_KINDS:
            parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string)
            count += sum(part.lower() in ("kind", "kinds") for part in parts)
        elif token.type in (tokenize.COMMENT, tokenize.STRING) and token.string.strip("'\"") != "kind":
            words = re.findall(r"\w+", token.string)
            count += sum(word.lower() in ("kind", "kinds") for word in words)
    return count


def test_the_package_says_kind_as_rarely_as_it_may():
    found = {str(path.relative_to(ROOT)): kinds_in(path.read_text(encoding="utf-8")) for path in MODULES}
    most = sorted(((count, path) for path, count in found.items() if count), reverse=True)[:9]
    assert sum(found.values()) <= MOST_KINDS, most


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("of_kind = UnitKind(kinds)", 3),
        ("x.device_kind, kindness", 0),
        ("# a kind of file\n'the kinds'", 2),
        ("event['kind']", 0),
        ("f'{unit.kind}'", 1),
    ],
)
def test_kind_is_counted_in_names_and_sentences(text, count):
    assert kinds_in(text) == count


def prose(path: Path) -> str:
    """Returns the sentences of a file: of code its comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    return "\n".join([*comments, *docstrings])


@cache
def defined(path: Path) -> set[str]:
    """Returns the names in a module: functions, classes, attributes and variables, imported ones included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # names that are imported when they are first used
    return names


def leads_somewhere(name: str, base: Path = PACKAGE) -> bool:
    """Returns whether a dotted name is a module of a folder, or something in one."""
    folder, parts = base, name.removeprefix("sppo_jax.").split(".")
    for number, part in enumerate(parts):
        if (folder / part).is_dir():
            folder = folder / part
            continue
        module = folder / f"{part}.py"
        if module.is_file():
            return number + 1 == len(parts) or parts[number + 1] in defined(module)
        return (folder / "__init__.py").is_file() and part in defined(folder / "__init__.py")
    return True


FILES = [
    ROOT / name
    for name in subprocess.check_output(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, text=True).split()
    if re.match(r"(sppo_jax|docs(?!/log)|bench|studies|examples)/|[A-Z]+\.md", name)
]
FOLDERS = {path.stem for path in PACKAGE.iterdir()} | {"planner"}  # the last one was one
SETTINGS = set(re.findall(r"^\| `([a-zA-Z_.]+)`", (ROOT / "docs/config.md").read_text(encoding="utf-8"), re.MULTILINE))
# Suffixes of files, and objects in the code around, such as the `training` of a `Data`.
_NOT_OURS = re.compile(r".*\.(py|json|yaml|html|md|csv)|data\.training|config\.num_layers")


def stale(text: str, folder: Path) -> list[str]:
    """Returns the dotted names and paths of a text that lead nowhere; paths may begin in the text's own folder."""
    found = []
    for name in _DOTTED.findall(text):
        of_settings = name.removeprefix("config.") in SETTINGS or name in SETTINGS
        ours = name.split(".")[0] in (FOLDERS | {"sppo_jax"}) and not _NOT_OURS.fullmatch(name)
        if ours and not of_settings and not leads_somewhere(name):
            found.append(name)
    bases = (ROOT, PACKAGE, folder, *folder.parents)
    return found + [path for path in _PATH.findall(text) if not any((base / path).is_file() for base in bases)]


def test_names_in_sentences_lead_somewhere():
    """Those of another project, which from-trl.md names, are not ours."""
    found = {path: stale(prose(path), path.parent) for path in FILES if path.name != "from-trl.md"}
    assert not {str(path.relative_to(ROOT)): names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("text", "is_stale"),
    [
        ("`planner.given`", True),
        ("`plan.plan.Plan`", False),
        ("`plan.plan.Nobody`", True),
        ("`sppo_jax.make_mesh`", False),
        ("`sppo_jax.no_mesh`", True),
        ("`search.space`", False),
        ("`config.train.seed` and `sequence.length`", False),
        ("`pipeline/params/layout.py`", False),
        ("`pipeline/layouts.py`", True),
    ],
)
def test_a_name_that_leads_nowhere_is_found(text, is_stale):
    assert bool(stale(text, PACKAGE)) == is_stale
